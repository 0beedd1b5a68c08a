"""slime's own helpers: what limits mean, and what a sample that begins again keeps."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_core.rollout.custom import load_generate
from slime_core.rollout.generate import Sampling
from slime_core.rollout.greedy import prompt_alone
from slime_core.rollout.runtime import Runtime
from slime_core.rollout.slime_names import GenerateState, begin_again, generate
from slime_core.sample import FIELD_NAMES, Sample, SpecInfo, Status
from tests.unit.rollout.scripted import Characters, Script

TWICE = """
from slime.rollout.sglang_rollout import generate as ask

async def generate(args, sample, sampling_params):
    sample = await ask(args, sample, sampling_params)
    sample.append_response_tokens(tokens=[46], log_probs=None, trainable=False)
    sample.status = sample.Status.PENDING
    return await ask(args, sample, sampling_params)
"""


def runtime(script: Script) -> Runtime:
    args = SimpleNamespace(max_turns=2, agent_path=None)
    sampling = Sampling(40, {}, 20.0)
    return Runtime(args, Characters(), script, None, sampling, lambda sample: 0)  # type: ignore[arg-type]


def limits(script: Script) -> list[int]:
    return [body["sampling_params"]["max_new_tokens"] for body in script.bodies]


def begun(length: int) -> Sample:
    sample = Sample(group_index=0, index=5, prompt="q", tokens=[1])
    if length:
        sample.append_response_tokens(tokens=[65] * length, log_probs=[-1.0] * length)
    return sample


@pytest.mark.parametrize("length", [0, 7])
def test_the_length_limit_of_a_function_holds_over_its_turns(tmp_path: Path, length: int):
    """Also where its sample had something before: the limit it gets is what is left."""
    (tmp_path / "g.py").write_text(TWICE)
    script = Script("four", "yes")
    function = load_generate(str(tmp_path / "g.py"))
    asyncio.run(function.run(runtime(script), [begun(length)]))
    assert limits(script) == [40 - length, 40 - length - 5 - 1]


def test_in_a_rollout_loop_a_sample_that_goes_on_has_the_rest_of_the_limit():
    script = Script("four")

    async def body() -> Any:
        there = runtime(script)
        with there.active():
            return await generate(None, begun(7), GenerateState().sampling_params)

    sample = asyncio.run(body())
    assert limits(script) == [33] and sample.response_length == 12


def test_a_sample_that_begins_again_keeps_all_that_it_was_drawn_with():
    drawn: dict[str, Any] = {
        "group_index": 1, "index": 5, "attempt": 2, "prompt": "q", "tokens": [1, 2], "label": "4",
        "metadata": {"a": 1}, "multimodal_inputs": {"images": ["x"]},
        "multimodal_train_inputs": {"pixels": [1]}, "multimodal_train_input_id": "i",
        "apply_chat_template_kwargs": {"k": 1}, "generate_function_path": "g.py",
        "custom_rm_path": "r.py", "train_metadata": {"t": 1}, "session_id": "s",
    }  # fmt: skip
    sample = Sample(**drawn)
    sample.append_response_tokens(tokens=[65], log_probs=[-1.0], text="A")
    sample.reward, sample.remove_sample, sample.rollout_id = 1.0, True, 5
    sample.weight_versions, sample.spec_info = ["a-1"], SpecInfo(1, 1, 1, 1)
    sample.of_a_source = "mine"  # type: ignore[attr-defined]
    again = begin_again(sample)
    fresh = Sample(status=Status.ABORTED)
    for name in FIELD_NAMES:
        assert getattr(again, name) == drawn.get(name, getattr(fresh, name)), name
    assert vars(again)["of_a_source"] == "mine"
    greedy = prompt_alone(sample)
    assert greedy == replace(again, status=Status.PENDING), "and what ReMax asks greedily"
    assert sample.response == "A", "the given one stays as it is"
