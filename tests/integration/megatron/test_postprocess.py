"""A function that changes an iteration's data before its steps, against the same data in the batch
and against what people get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import numpy as np
import postprocess_jobs
import pytest
from postprocess_given import keeps

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.batching.select import rollout_denominators
from slime_core.batching.types import TrainBatch
from slime_core.errors import PluginError
from slime_core.tracking.registry import find

BASE: dict[str, Any] = {
    "lr": 1e-2,
    "weight_decay": 0.0,
    "train_iters": 10,
    "adam_eps": 1e-2,
    "rollout_temperature": 1.0,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 64,
    "collective_timeout_s": 60.0,
    "args": SimpleNamespace(factor=0.5, sglang_api_key="***"),
}
KEYS = ("loss", "grad_norm", "tokens", "rollout/log_probs", "rollout/advantages")
Steps = list[dict[str, Any]]


def hook(name: str) -> dict[str, Any]:
    file = Path(__file__).parent / "postprocess_given.py"
    return {"rollout_data_postprocess_path": f"{file}:{name}"}


@pytest.fixture
def train(model: str, in_trainer: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    def run(batches: list[TrainBatch], more: Any = None, **algorithm: Any) -> list[dict[str, Any]]:
        chosen = BASE | {"hf_checkpoint": model, "algorithm": AlgorithmSettings(**algorithm)}
        return in_trainer(jobs.train, chosen | (more or {}), batches)["results"]

    return run


def without(batch: TrainBatch) -> TrainBatch:
    """The batch with the masks that `masks` would leave."""
    kept = [keeps(row, int(n)).numpy() for row, n in enumerate(batch.response_lengths)]
    changed = replace(batch, loss_mask=batch.loss_mask * np.concatenate(kept).astype(np.uint8))
    denominators = rollout_denominators(changed.mask_sums, batch.rollout_ids)
    return replace(changed, denominators=denominators)


def assert_equal(ours: Steps, theirs: Steps) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        for name in KEYS:
            assert mine[name] == pytest.approx(other[name], rel=1e-4, abs=2e-6), name


@pytest.mark.parametrize(
    "name", ["masks", pytest.param("masks_through_numpy", marks=pytest.mark.slow)]
)
def test_masks_taken_out_by_a_function_train_as_masks_of_the_batch(
    two_steps: TrainBatch, train: Callable[..., Any], name: str
) -> None:
    """Rows of one rollout share its denominator, and one row loses all of its tokens."""
    (ours,) = train([two_steps], **hook(name))
    (theirs,) = train([without(two_steps)])
    assert_equal(ours["steps"], theirs["steps"])
    gone = [
        int(two_steps.mask_sums[list(step)].sum() - without(two_steps).mask_sums[list(step)].sum())
        for step in two_steps.steps
    ]
    assert [step["postprocess_masked_tokens"] for step in ours["steps"]] == gone and min(gone) > 0
    assert ours["metrics"]["postprocess_masked_tokens"] == sum(gone) / 2
    assert find("train/postprocess_masked_tokens") and find("train/postprocess_changed_advantages")
    (plain,) = train([two_steps])
    assert abs(plain["steps"][0]["loss"] - ours["steps"][0]["loss"]) > 1e-3


@pytest.mark.slow
def test_per_token_losses_and_supervised_ones_count_the_tokens_that_are_left(
    batch: TrainBatch, train: Callable[..., Any]
) -> None:
    for settings in ({"calculate_per_token_loss": True}, {"loss_type": "sft_loss"}):
        (ours,), (theirs,) = (
            train([batch], **settings, **hook("masks")),
            train([without(batch)], **settings),
        )
        assert_equal(ours["steps"], theirs["steps"])


def test_advantages_by_iteration(batch: TrainBatch, train: Callable[..., Any]) -> None:
    first, second = train([batch, batch], **hook("halves"))
    same, other = train([batch, replace(batch, rewards=batch.rewards / 2)])
    assert_equal(first["steps"], same["steps"])
    assert_equal(second["steps"], other["steps"])
    assert "postprocess_changed_advantages" not in first["steps"][0]
    nonzero = (batch.rewards[batch.response_rows] != 0).sum()
    assert second["steps"][0]["postprocess_changed_advantages"] == nonzero


def test_old_log_probs_are_what_the_ratio_refers_to(
    batch: TrainBatch, train: Callable[..., Any]
) -> None:
    (result,) = train([batch], **hook("older"))
    assert result["steps"][0]["ppo_kl"] == pytest.approx(0.1, rel=1e-4)


@pytest.mark.slow
def test_the_correction_reads_the_engines_log_probs_afterwards(
    batch: TrainBatch, train: Callable[..., Any]
) -> None:
    """Also the scale that makes the mean weight 1."""
    settings = {"use_tis": True, "tis_clip": 1.3, "tis_batch_normalize": True}
    settings |= {"calculate_per_token_loss": True}
    (ours,) = train([batch], **settings, **hook("trusts_the_trainer"))
    (plain,) = train([batch], **settings)
    scaled = [r["steps"][0]["tis"] * r["steps"][0]["tis_scale"] for r in (ours, plain)]
    assert scaled == pytest.approx([1.0, 1.0], rel=1e-5)
    assert abs(ours["steps"][0]["tis_scale"] - plain["steps"][0]["tis_scale"]) > 1e-4
    gap = "train_rollout_logprob_abs_diff"
    assert ours["steps"][0][gap] < 0.9 * plain["steps"][0][gap]
    assert abs(ours["steps"][0]["loss"] - plain["steps"][0]["loss"]) > 1e-4


@pytest.mark.slow
def test_it_sees_log_probs_of_all_roles(batch: TrainBatch, train: Callable[..., Any]) -> None:
    (ours,) = train([batch], use_kl_loss=True, kl_loss_coef=0.1, **hook("sees_all"))
    (plain,) = train([batch], use_kl_loss=True, kl_loss_coef=0.1, old_log_probs="recompute")
    assert ours["steps"][0]["weights_digest"] == plain["steps"][0]["weights_digest"]
    assert ours["steps"][0]["postprocess_masked_tokens"] == 0


def test_an_iteration_without_a_token_left_changes_nothing(
    batch: TrainBatch, train: Callable[..., Any]
) -> None:
    (result,) = train([batch], **hook("everything"))
    (step,) = result["steps"]
    assert (step["loss"], step["grad_norm"], step["tokens"]) == (0, 0, 0)
    assert step["postprocess_masked_tokens"] == batch.loss_mask.sum()


def test_random_numbers_are_those_of_the_iteration(
    batch: TrainBatch, train: Callable[..., Any]
) -> None:
    """So that a replay, and every rank, gets the same."""
    once, again = (train([batch, batch], **hook("at_random")) for _ in range(2))
    assert [r["steps"] for r in once] == [r["steps"] for r in again]
    told = [result["postprocessed"] for result in once]
    assert told == [result["postprocessed"] for result in again] and told[0] != told[1]


@pytest.mark.parametrize("name", ["masks", pytest.param("at_random", marks=pytest.mark.slow)])
def test_two_ranks_change_the_same(
    model: str,
    two_steps: TrainBatch,
    train: Callable[..., Any],
    in_ranks: Callable[..., list[Any]],
    name: str,
) -> None:
    algorithm = AlgorithmSettings(**hook(name))
    chosen = BASE | {"hf_checkpoint": model, "algorithm": algorithm}
    pair = [one["results"][0] for one in in_ranks(jobs.train_on_rank, chosen, [two_steps])]
    (alone,) = train([two_steps], **hook(name))
    assert pair[0]["steps"] == pair[1]["steps"]
    assert_equal(pair[0]["steps"], alone["steps"])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other_on_each_rank", "changed other data on rank 1 than on rank 0: what it does may"),
        ("fails_on_one_rank", "on rank 1, .*fails_on_one_rank raised ValueError: my disk is full"),
    ],
)
def test_ranks_that_differ_are_told_the_same_sentence(
    model: str, batch: TrainBatch, in_ranks: Callable[..., list[Any]], name: str, says: str
) -> None:
    chosen = BASE | {"hf_checkpoint": model}
    own, other = in_ranks(postprocess_jobs.told_on_rank, chosen, batch, hook(name))
    assert own == other
    with pytest.raises(PluginError, match=says):
        raise PluginError(own)


WRONG = {
    "gives_masks": "returned dict, which nothing reads: it must change rollout_data itself",
    "no_masks": "must set rollout_data['loss_masks'] to a list of 24 tensors, one for each row",
    "one_row_less": "must set rollout_data['loss_masks'] to a list of 24 tensors",
    "shorter": "advantages of row 2 must be a tensor of its",
    "list_of_numbers": "response tokens, not list",
    "soft_masks": "loss_masks of row 2 hold more than 0 and 1",
    "brings_in": "loss_masks of row 3 are 1 where they were 0: a token can be taken out of",
    "nan": "advantages of row 4 is inf at response token 0",
    "raises": "raises raised KeyError: 'no_such'",
    "exits": "called sys.exit(3): it must return or raise instead",
    "awaits": "must be a plain `def`: nothing awaits it",
    "two": "it is called as (args, rollout_id, rollout_data)",
    "edits_tokens": "changed rollout_data['tokens'], but it is fixed by now (it may change loss_",
    "edits_metadata": "changed rollout_data['metadata'], but it is fixed by now",
    "rewards": "changed rollout_data['rewards'], but advantages have been made of it: change adv",
    "unread": "changed rollout_data['rollout_log_probs'], but these settings read it only with use",
    "own_column": "added rollout_data['weights'], which nothing reads: it may change loss_masks, a",
    "takes_away": "removed rollout_data['truncated']",
    "never_ends": "did not end within 0.1 s (half of stage_timeout_s)",
    "shows_settings": "raised ValueError: key ***",
    "no_such_function": "it has no 'no_such_function'",
}


@pytest.fixture(scope="module")
def told(model: str, batch: TrainBatch, in_trainer: Callable[..., Any]) -> dict[str, str]:
    """What each of them ends in, all in one trainer."""
    tagged = replace(batch, metadata=tuple({"row": row} for row in range(batch.num_rows)))
    chosen = BASE | {"hf_checkpoint": model, "algorithm": AlgorithmSettings()}
    return in_trainer(postprocess_jobs.told, chosen, tagged, {name: hook(name) for name in WRONG})


@pytest.mark.parametrize("name", sorted(WRONG))
def test_what_is_wrong_is_one_sentence_before_any_step(told: dict[str, str], name: str) -> None:
    assert WRONG[name] in told[name]
    assert "\n" not in told[name] and "postprocess_given.py" in told[name]


def test_the_batch_is_as_before_and_trains_after_them(told: dict[str, str]) -> None:
    assert told["after"] == "the batch, the random state and the weights are as before"
