"""The ready multi-turn function and its helpers, turn by turn, against a scripted engine."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slime_core.errors import PluginError
from slime_core.rollout import multiturn
from slime_core.rollout import runtime as runtime_module
from slime_core.rollout.custom import load_generate
from slime_core.rollout.generate import Sampling
from slime_core.rollout.runtime import Runtime, current
from slime_core.sample import Sample, Status
from tests.unit.rollout.scripted import Characters, Script

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


def runtime(script: Script, limit: int = 400, **changes: Any) -> Runtime:
    args = {
        "max_turns": 5, "tool_paths": ["calculator"], "tool_timeout_s": 5.0, "tool_parser": "auto",
        "apply_chat_template": True, "rm_type": None, "custom_rm_path": None, **changes,
    }  # fmt: skip
    seeds = lambda sample: sample.index * 1000 + sample.response_length  # noqa: E731
    return Runtime(SimpleNamespace(**args), Characters(), script, None, Sampling(limit, {}, 5.0),
                   seeds)  # type: ignore[arg-type]  # fmt: skip


def prompt(text: str = "[user]6*7?~\n[assistant]", index: int = 0) -> Sample:
    tokens = Characters().encode(text)
    return Sample(group_index=0, index=index, prompt=text, tokens=tokens, label="42")


def run(script: Script, sample: Sample, **options: Any) -> Sample:
    there = runtime(script, **options)

    async def body() -> Sample:
        with there.active():
            return await multiturn.generate(there.args, sample, {"temperature": 1.0})

    return asyncio.run(body())


def test_a_call_is_answered_and_the_answer_is_not_trained():
    script = Script(CALL, "42")
    sample = run(script, prompt())
    text = Characters().decode(sample.tokens)
    assert text == f"[user]6*7?~\n[assistant]{CALL}~\n[tool]42~\n[assistant]42~"
    said, told, final = [span.length for span in sample.spans]
    assert (said, final) == (len(CALL) + 1, 3) and told == len("\n[tool]42~\n[assistant]")
    assert sample.loss_mask == [1] * said + [0] * told + [1] * final
    assert (sample.response, sample.status) == ("42", Status.COMPLETED)
    assert sample.metadata["round_number"] == 2 and sample.non_generation_time > 0
    assert script.bodies[1]["input_ids"] == sample.tokens[:-final], "token in, token out"
    seeds = [body["sampling_params"]["sampling_seed"] for body in script.bodies]
    assert seeds == [0, said + told]


def test_every_turn_carries_the_media_of_the_prompt():
    script = Script(CALL, "42")
    sample = prompt()
    sample.multimodal_inputs = {"images": ["http://x/1.png"]}
    run(script, sample)
    assert [body["image_data"] for body in script.bodies] == [["http://x/1.png"]] * 2


def test_turns_are_limited_and_so_is_the_length_over_all_of_them():
    assert run(Script(CALL, CALL, CALL), prompt(), max_turns=2).metadata["round_number"] == 2
    limit = len(CALL) + 1 + len("\n[tool]42~\n[assistant]") + 5
    cut = run(Script(CALL, "a long story"), prompt(), limit=limit)
    assert (cut.response_length, cut.status) == (limit, Status.TRUNCATED)
    full = run(Script(CALL), prompt(), limit=len(CALL) + 4)
    assert (full.response_length, full.status) == (len(CALL) + 4, Status.TRUNCATED)
    assert full.loss_mask[-3:] == [0, 0, 0]


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ('{"name": "calculatr", "arguments": {}}', "error: no tool 'calculatr'; did you mean"),
        ('{"name": "calculator", "arguments": {"x": 1}}', "error: calculator: missing a required"),
        ('{"name": "calculator", "arguments": [1]}', "error: the arguments of calculator are not"),
        ('{"name": "calculator", "arguments": {"expression": "1/0"}}', "error: ZeroDivisionError"),
        ('{"name": "calculator", "arg', "error: no tool ''"),
    ],
)
def test_what_goes_wrong_with_a_call_is_told_to_the_model(call, answer):
    sample = run(Script(f"<tool_call>{call}</tool_call>", "ok"), prompt())
    assert f"[tool]{answer}" in Characters().decode(sample.tokens)
    assert sample.response == "ok"


def test_plain_prompts_get_the_result_as_text():
    sample = run(Script(CALL, "42"), prompt("6*7?"), apply_chat_template=False)
    bridge = "\n<tool_response>\n42\n</tool_response>\n"
    assert Characters().decode(sample.tokens) == f"6*7?{CALL}~{bridge}42~"


def test_a_template_that_changes_earlier_messages_is_refused(monkeypatch):
    monkeypatch.setattr(Characters, "keeps_prefix", False)
    with pytest.raises(PluginError, match="template that keeps its prefix"):
        run(Script(CALL, "42"), prompt())


SEED = """
from slime_core.rollout.multiturn import (
    build_loss_mask, compute_reward, execute_tool, extract_tool_call, generate_single)

async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        conversation = [{"role": "user", "content": sample.prompt}]
        for turn in range(args.max_turns):
            response = await generate_single(conversation)
            call = extract_tool_call(response)
            if not call:
                sample.response = response
                break
            result = execute_tool(call)
            conversation.append({"role": "assistant", "content": response})
            conversation.append({"role": "tool", "content": result})
        sample.reward = compute_reward(sample)
        MASK
    return samples
"""


@pytest.mark.parametrize("mask", ["sample.loss_mask = build_loss_mask(sample)", "pass"])
def test_the_helpers_keep_tokens_behind_a_function_that_sees_text(tmp_path, mask):
    (tmp_path / "g.py").write_text(SEED.replace("MASK", mask))
    function = load_generate(str(tmp_path / "g.py"))
    assert function.per_list
    script = Script(CALL, "42", "41")
    there = runtime(script)
    samples = [prompt(index=0), prompt(index=1)]
    first, second = asyncio.run(function.run(there, samples))
    text = Characters().decode(first.tokens)
    assert text == f"[user]6*7?~\n[assistant]{CALL}~\n[tool]42~\n[assistant]42~"
    assert first.loss_mask == [1] * (len(CALL) + 1) + [0] * 22 + [1] * 3
    assert [s.reward for s in (first, second)] == [1.0, 0.0]
    assert (second.response, second.loss_mask, second.index) == ("41", [1, 1, 1], 1)
    assert second.weight_versions == ["a-1"]


def test_a_response_without_tokens_is_refused(tmp_path):
    (tmp_path / "g.py").write_text(
        "async def generate(args, sample, sampling_params):\n"
        "    sample.response = 'text of my own'\n    return sample\n"
    )
    with pytest.raises(PluginError, match="has a response without tokens; use"):
        asyncio.run(load_generate(str(tmp_path / "g.py")).run(runtime(Script()), [prompt()]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("async def generate(args): ...", "does not fit"),
        ("async def a(x, y, z): ...\nasync def b(x, y, z): ...", "a, b and no single function"),
    ],
)
def test_wrong_forms_are_said_when_they_are_loaded(tmp_path, source, message):
    (tmp_path / "g.py").write_text(source)
    with pytest.raises(PluginError, match=message):
        load_generate(str(tmp_path / "g.py"))


def test_outside_of_a_rollout_the_helpers_say_so(monkeypatch):
    monkeypatch.setattr(runtime_module, "_OF_THREADS", [])  # whole functions leave theirs there
    with pytest.raises(PluginError, match="only inside a generate or reward function"):
        current()
