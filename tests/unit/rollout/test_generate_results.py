"""What generate functions may return, what is filled in for them, and what costs the group."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_core.errors import PluginError
from slime_core.rewards.hub import RewardHub, RewardSettings
from slime_core.rollout.custom import load_generate
from slime_core.rollout.generate import Sampling
from slime_core.rollout.group import GroupMaker
from slime_core.rollout.runtime import Runtime
from slime_core.rollout.scoring import GradingStoppedError, Scorer
from slime_core.sample import Sample
from slime_core.store.parts import DROPPED, KEPT
from tests.unit.rollout.scripted import Characters

FUNCTIONS = """
import copy
import numpy as np
import torch
from slime.utils.types import Sample

def fill(sample, **changes):
    sample.tokens = [*sample.tokens, 65, 66, 67]
    sample.response, sample.response_length = "ABC", 3
    sample.loss_mask, sample.rollout_log_probs = [1] * 3, [-0.5] * 3
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample

def last(sample, token):
    sample.tokens[-1] = token
    return sample

async def arrays(args, sample, params):
    fill(sample)
    return fill(sample, tokens=np.array([1, 65, 66, 67]), loss_mask=np.ones(3),
                rollout_log_probs=torch.full((3,), -0.5), reward=np.float32(0.5))
async def tensor_reward(args, sample, params): return fill(sample, reward=torch.tensor(1.0))
async def fresh(args, sample, params):
    return Sample(tokens=[1, 65], response="A", response_length=1, loss_mask=[1],
                  rollout_log_probs=[-0.5], weight_versions="l0-1", metadata=None)
async def other_index(args, sample, params): return fill(sample, index=99, group_index=7)
async def backwards(args, samples, evaluation=False): return [fill(s) for s in samples][::-1]
async def twice(args, sample, params): return [fill(sample)] * 2
async def none_response(args, sample, params): return fill(sample, response=None)
async def byte_response(args, sample, params): return fill(sample, response=b"ABC")
async def text_metadata(args, sample, params): return fill(sample, metadata="x")
async def nan_log_prob(args, sample, params):
    return fill(sample, rollout_log_probs=[float("nan"), -0.5, -0.5])
async def negative(args, sample, params): return last(fill(sample), -5)
async def negative_alone(args, sample, params): return last(fill(sample, response=""), -5)
async def unknown(args, sample, params): return last(fill(sample), 1000)
async def text_token(args, sample, params): return last(fill(sample), "A")
async def no_prompt(args, sample, params): return fill(sample, tokens=[65, 66, 67])
async def no_tokens(args, sample, params): return fill(sample, tokens=None)
async def nothing(args, sample, params):
    sample.tokens = None
    return sample
async def no_length(args, sample, params): return fill(sample, response_length=None)
async def text_mask(args, sample, params): return fill(sample, loss_mask="111")
async def half_mask(args, sample, params): return fill(sample, loss_mask=[1, 0.5, 1])
async def none_mask(args, sample, params): return fill(sample, loss_mask=[1, None, 1])
async def spans(args, sample, params): return fill(sample, spans=[(0, 5, "x")])
async def text_reward(args, sample, params): return fill(sample, reward="1")
async def array_reward(args, sample, params): return fill(sample, reward=np.array([0.5]))
async def nan_reward(args, sample, params): return fill(sample, reward=float("nan"))
async def dict_reward(args, sample, params): return fill(sample, reward={"a": 1.0})
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "g.py").write_text(FUNCTIONS)
    return str(tmp_path / "g.py")


def made(path: str, name: str, **settings: Any) -> Any:
    """The outcome of a group of two samples."""
    function = f"{path}:{name}"
    args = SimpleNamespace(
        custom_generate_function_path=function, dynamic_sampling_filter_path=None,
        rollout_sample_hook_path=[], rollout_skip_special_tokens=False, failed_samples="mask",
        advantage_estimator="grpo", custom_rm_path=None, max_turns=1, agent_path=None,
    )  # fmt: skip
    samples = [Sample(group_index=3, index=6 + i, prompt="q", tokens=[1], label="ABC",
                      metadata={"from": "row"}) for i in range(2)]  # fmt: skip

    async def body() -> Any:
        hub = RewardHub(RewardSettings(rm_type="exact_match", **settings), args)
        runtime = Runtime(args, Characters(), None, hub, Sampling(99, {}, 20.0), lambda s: 0,  # type: ignore[arg-type]
                          vocab_size=100)  # fmt: skip
        try:
            return await GroupMaker(args, Scorer(hub)).finish(runtime, samples, 0)
        finally:
            await hub.close()

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("name", "rewards"),
    [("arrays", [0.5] * 2), ("tensor_reward", [1.0] * 2), ("fresh", [0.0] * 2),
     ("other_index", [1.0] * 2), ("backwards", [1.0] * 2),
     ("none_response", [1.0] * 2)],
)  # fmt: skip
def test_what_can_be_understood_is_taken_and_filled_in(path, name, rewards):
    outcome = made(path, name)
    assert outcome.verdict == KEPT
    assert [row.reward for row in outcome.samples] == rewards
    assert all(type(row.reward) is float for row in outcome.samples)
    assert [(row.group_index, row.index) for row in outcome.samples] == [(3, 6), (3, 7)]
    assert all(row.label == "ABC" and row.metadata == {"from": "row"} for row in outcome.samples)
    if name == "fresh":
        assert {row.prompt for row in outcome.samples} == {"q"}
        assert all(row.weight_versions == ["l0-1"] for row in outcome.samples)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("twice", "returned a Sample twice; copy it"),
        (
            "byte_response",
            "g.py:byte_response left sample 6 of group 3 so that its response is b'ABC', not text",
        ),
        ("text_metadata", "its metadata is 'x', not a dict"),
        ("nan_log_prob", "its rollout_log_probs are not all finite"),
        ("negative_alone", "it has the token -5; the model knows those from 0 to 99"),
        ("negative", "it has the token -5; the model knows those from 0 to 99"),
        ("unknown", "it has the token 1000; the model knows those from 0 to 99"),
        ("text_token", "its tokens or log-probs are no numbers"),
        ("no_prompt", "its tokens hold the response alone; the prompt's tokens come first"),
        (
            "no_tokens",
            "no_tokens left sample 6 of group 3 so that its tokens is None, no list",
        ),
        ("nothing", "its tokens is None, no list"),
        ("no_length", "its response_length is None, no count of tokens"),
        ("text_mask", "its loss_mask is '111', no list"),
        ("half_mask", "its loss_mask holds 0.5; 1 stands for a token that is trained"),
        ("none_mask", "its loss_mask holds None; 1 stands for a token that is trained"),
        ("spans", "in a form of its own: 'tuple' object has no attribute 'length'"),
    ],
)
def test_what_cannot_be_trained_costs_its_group_an_attempt_and_is_said(path, name, says):
    with pytest.raises(PluginError) as error:
        made(path, name)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("text_reward", "not_a_number"), ("array_reward", "not_a_number"),
     ("nan_reward", "non_finite")],
)  # fmt: skip
def test_a_reward_that_is_none_is_an_error_of_its_sample(path, name, reason):
    outcome = made(path, name)
    assert (outcome.verdict, outcome.reason) == (DROPPED, f"reward_error/{reason}")
    assert all(row.metadata["reward_error"]["reason"] == reason for row in outcome.samples)


def test_a_dict_of_a_functions_own_needs_a_key_too(path):
    with pytest.raises(GradingStoppedError, match="returned several values; choose one of a with"):
        made(path, "dict_reward")
    outcome = made(path, "dict_reward", reward_key="a")
    assert outcome.verdict == KEPT and outcome.samples[0].reward == {"a": 1.0}


def test_functions_are_still_known_by_their_form(path):
    assert load_generate(f"{path}:backwards").per_list
