"""What a check says of agents and of the chat template that joins their turns."""

from pathlib import Path

import pytest

from slime_core.check.findings import Findings
from slime_core.check.plugins import check_rollout, check_template
from slime_core.config.loading import load_config
from tests.unit.rollout.scripted import Characters
from tests.unit.rollout.test_bridge import Rewriting, Thinking

AGENTS = """
async def fits(base_url, api_key, sample): return 1.0
async def too_few(base_url, sample): return 1.0
def plain(base_url, api_key, sample): return 1.0
"""


def checked(folder: Path, name: str) -> Findings:
    (folder / "a.py").write_text(AGENTS)
    config = load_config("configs/quickstart.yaml", {"agent_path": f"{folder / 'a.py'}:{name}"})
    findings = Findings()
    check_rollout(config, [], findings)
    return findings


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("too_few", "it is called as (base_url, api_key, sample)"),
        ("fit", "did you mean fits?"),
    ],
)
def test_an_agent_that_cannot_be_called_is_a_problem(tmp_path, name, says):
    [problem] = checked(tmp_path, name).problems
    assert says in problem


def test_an_agent_that_can_be_is_shown_with_its_parameters(tmp_path):
    for name in ("fits", "plain"):
        findings = checked(tmp_path, name)
        assert not findings.problems
        shown = findings.facts["rollout"]["agent_path"]
        assert shown.endswith(f"{name}(base_url, api_key, sample)")


def test_the_template_is_looked_at_where_turns_are_joined():
    def noted(tokenizer, **settings):
        config, findings = load_config("configs/quickstart.yaml", settings), Findings()
        check_template(config, tokenizer, findings)
        return findings

    agent = {"agent_path": "a.py:a"}
    tools = {"tool_paths": ["calculator"], "apply_chat_template": True,
             "custom_generate_function_path": "slime_core.rollout.multiturn.generate"}  # fmt: skip
    [note] = noted(Thinking(), **agent).notes
    assert "leaves out earlier reasoning" in note and "as it was sampled" in note
    for kept in (noted(Characters(), **agent), noted(Thinking(), **tools), noted(Thinking())):
        assert not kept.notes and not kept.problems
    [problem] = noted(Rewriting(), **agent).problems
    assert "take a template that keeps its prefix" in problem
