"""Evaluations have a state of their own: what a function stops or keeps in one stays there."""

import asyncio
import json
from pathlib import Path
from typing import Any

from slime_core.config.loading import load_config
from slime_core.contracts.example import SETTINGS
from slime_core.errors import RewardError
from slime_core.plugins.args_view import ArgsView
from slime_core.plugins.load import load
from slime_core.rewards.hub import RewardHub, RewardSettings
from slime_core.rollout.evaluation import Evaluator
from slime_core.rollout.generate import Sampling
from slime_core.rollout.group import GroupMaker
from slime_core.rollout.runtime import Runtime
from slime_core.rollout.scoring import Scorer
from slime_core.rollout.settings import EvalJob
from tests.unit.rollout.scripted import Characters, Script

FUNCTIONS = """
from slime.rollout.sglang_rollout import GenerateState
STOP = [True]
SEEN = []

async def stops_once(args, sample, sampling_params, evaluation=False):
    state = GenerateState(args)
    SEEN.append((state.aborted, id(state)))
    state.aborted = STOP.pop() if STOP else False
    return await asks(args, sample, sampling_params)

async def asks(args, sample, sampling_params, evaluation=False):
    from slime.rollout.sglang_rollout import generate
    return await generate(args, sample, sampling_params)

async def two_turns(args, samples, evaluation=False):
    from slime_core.rollout.multiturn import generate_single
    for sample in samples:
        talk = sample.prompt
        first = await generate_single(args, talk)
        talk += [{"role": "assistant", "content": first}, {"role": "tool", "content": "."}]
        sample.response = await generate_single(args, talk)
    return samples
"""


def evaluate(folder: Path, function: str, prompts: list[Any], script: Script, times: int = 1):
    """What the evaluator gives for a dataset, time after time: groups, or the error."""
    path = folder / "g.py"
    path.write_text(FUNCTIONS)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"input": p, "label": "4"}) + "\n" for p in prompts))
    dataset = {
        "name": "held", "path": str(rows), "label_key": "label", "rm_type": "exact_match",
        "custom_generate_function_path": f"{path}:{function}", "max_response_len": 64,
    }  # fmt: skip
    settings = {**SETTINGS, "eval": {"eval_interval": 1, "eval_config": {"datasets": [dataset]}}}
    config = load_config(settings, {})
    args = ArgsView(config)

    async def body() -> list[Any]:
        hub = RewardHub(RewardSettings(rm_type="exact_match", end_tokens=("~",)), args)
        runtime = Runtime(args, Characters(), script, hub, Sampling(64, {}, 20.0),  # type: ignore[arg-type]
                          lambda sample: 0)  # fmt: skip
        evaluator = Evaluator(config, None, GroupMaker(args, Scorer(hub)), runtime)  # type: ignore[arg-type]
        evaluator.open_all()
        found: list[Any] = []
        for _ in range(times):
            try:
                [dataset] = evaluator.datasets
                found.append((await evaluator.answered(dataset, EvalJob(1, "a-1", "held")))[0])
            except RewardError as error:
                found.append(error)
        await hub.close()
        return found

    return asyncio.run(body()), load(f"{path}:SEEN")


def test_one_that_was_aborted_says_so_and_the_next_begins_anew(tmp_path):
    [first, second], seen = evaluate(tmp_path, "stops_once", ["q"], Script("4", "4"), times=2)
    assert isinstance(first, RewardError) and "GenerateState.aborted" in str(first)
    assert [[s.reward for s in group] for group in second] == [[1.0]]
    assert [aborted for aborted, _ in seen] == [False, False]


class InStep(Script):
    """Answers only once every conversation has asked, so that they run beside each other."""

    def __init__(self, conversations: int) -> None:
        super().__init__()
        self.here = asyncio.Barrier(conversations)

    async def generate_raw(self, body: dict[str, Any]) -> dict[str, Any]:
        await self.here.wait()
        self.texts.insert(0, "4")  # all say the same
        return await super().generate_raw(body)


def test_conversations_of_different_prompts_do_not_mix(tmp_path):
    prompts = [[{"role": "user", "content": f"q{i}"}] for i in range(3)]
    [groups], _ = evaluate(tmp_path, "two_turns", prompts, InStep(3))
    for i, [row] in enumerate(groups):
        assert Characters().decode(row.tokens).startswith(f"[user]q{i}~"), i
        assert row.prompt == prompts[i]
