"""What a function may make of the samples of a batch, and the sentence about all else."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slime_core.batching.converted import OPTIONAL, Converted, converted
from slime_core.errors import DataError
from slime_core.sample import Sample

N = 4
RAW = np.array([0.0, 1.0, 2.0, 3.0])
ROLLOUTS = np.array([10, 10, 20, 30])  # the first two rows are one rollout


def samples() -> list[Sample]:
    made = []
    for i in range(N):
        sample = Sample(index=100 + i, tokens=[7, 8, *range(i + 2)], response_length=i + 2)
        sample.rollout_log_probs = [-0.5] * (i + 2)
        sample.status = Sample.Status.COMPLETED
        made.append(sample)
    made[1].loss_mask = [0, 1, 1]
    made[3].status = Sample.Status.TRUNCATED
    made[3].train_metadata = {"weight": 2}
    return made


def returned(given: list[Sample], **changes: Any) -> dict[str, Any]:
    """What slime's own conversion returns, with changes."""
    found: dict[str, Any] = {
        "tokens": [s.tokens for s in given],
        "response_lengths": [s.response_length for s in given],
        "rewards": [0.5 * i for i in range(len(given))],
        "raw_reward": [float(s.index or 0) for s in given],
        "truncated": [int(s.status is Sample.Status.TRUNCATED) for s in given],
        "sample_indices": [s.index for s in given],
        "loss_masks": [s.loss_mask or [1] * s.response_length for s in given],
        "rollout_log_probs": [s.rollout_log_probs for s in given],
        "metadata": [s.train_metadata for s in given],
    }
    return found | changes


def made(found: Any, stored: list[Sample] | None = None) -> Converted:
    return converted("my.convert", found, stored or samples(), RAW, ROLLOUTS)


def test_what_slimes_own_conversion_returns_changes_nothing_but_rewards():
    got = made(returned(samples()))
    assert got.rewards.tolist() == [0.0, 0.5, 1.0, 1.5]
    assert got.raw_rewards.tolist() == [100.0, 101.0, 102.0, 103.0]
    assert (got.left_out, got.masks, got.truncated, got.metadata) == ((), {}, {}, {})


def test_four_columns_are_enough_and_arrays_are_lists():
    import torch

    found = returned(samples())
    found = {key: found[key] for key in ("tokens", "response_lengths", "rewards", "loss_masks")}
    found["rewards"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found["tokens"] = [torch.tensor(row) for row in found["tokens"]]
    found["response_lengths"] = np.array(found["response_lengths"])
    found["loss_masks"] = [np.array(row, dtype=bool) for row in found["loss_masks"]]
    got = made(found)
    assert got.rewards.tolist() == [1.0, 2.0, 3.0, 4.0] and got.raw_rewards.tolist() == [*RAW]
    assert not got.masks and not got.left_out


def test_rows_are_found_by_their_sample_and_what_differs_is_kept():
    stored = samples()
    given = [stored[3], stored[1], stored[0]]
    found = returned(given, rewards=[3.0, 1.0, 0.0], truncated=[0, 1, 0],
                     loss_masks=[[0, 1, 1, 0, 1], [0, 1, 1], [0, 0]],
                     metadata=[None, {"a": [1]}, None])  # fmt: skip
    got = made(found, stored)
    assert got.rewards.tolist() == [0.0, 1.0, 0.0, 3.0] and got.left_out == (2,)
    assert got.raw_rewards.tolist() == [100.0, 101.0, 2.0, 103.0], "as graded where left out"
    assert {row: mask.tolist() for row, mask in got.masks.items()} == {
        3: [0, 1, 1, 0, 1], 0: [0, 0],
    }  # fmt: skip
    assert got.truncated == {3: 0, 1: 1} and got.metadata == {3: None, 1: {"a": [1]}}


def test_siblings_that_share_an_index_are_told_by_their_tokens():
    stored = samples()
    stored[1].index = stored[0].index
    got = made(returned([stored[1], stored[0], stored[2]]), stored)
    assert got.rewards.tolist() == [0.5, 0.0, 1.0, 0.0] and got.left_out == (3,)


def test_a_removed_sample_stays_removed():
    stored = samples()
    stored[2].remove_sample = True
    got = made(returned(stored), stored)
    assert not got.masks


def test_rollouts_may_have_other_numbers_but_no_other_members():
    given = samples()
    assert not made(returned(given, rollout_ids=[5, 5, 6, 7])).masks
    assert not made(returned(given, rollout_ids=[None] * N)).masks
    sums = [4.0, 4.0, 4.0, 5.0]  # 2 trained tokens of each of the siblings' rows, ...
    assert not made(returned(given, rollout_mask_sums=sums)).masks


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda found: {name: value for name, value in found.items() if name != key}


def cell(key: str, row: int, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(found: dict[str, Any]) -> dict[str, Any]:
        column = list(found[key])
        column[row] = value
        return found | {key: column}

    return change


def shorter(*without_keys: str) -> Callable[[dict[str, Any]], Any]:
    return lambda found: {k: v[1:] for k, v in found.items() if k not in without_keys}


WRONG: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda found: [found], "my.convert must return a dict of columns, not list"),
    (without("tokens"), "my.convert returned no tokens: it must return tokens, response_lengths"),
    (lambda found: found | {"loss_masks": None}, "my.convert returned no loss_masks"),
    (lambda found: found | {"advantages": [1.0] * N}, "returned advantages, which nothing here"),
    (lambda found: found | {"rewards": 1.0}, "my.convert: rewards must be a list"),
    (lambda found: found | {"rewards": [1.0]}, "rewards has 1 entries for 4 rows of tokens"),
    (lambda found: {k: [] for k in found}, "my.convert returned no row"),
    (shorter("sample_indices"), "my.convert returned 3 rows for 4 samples without sample_indices"),
    (cell("sample_indices", 2, 9), "sample_indices of row 2 is 9, and the batch has no such"),
    (cell("sample_indices", 2, 101), "sample_indices of row 2 is 101 again: each stored row"),
    (cell("tokens", 1, [7, 8, 0.5]), "tokens of row 1 (sample 101) must be a flat list of integ"),
    (cell("tokens", 1, [7, 8, 0, 1, 3]), "tokens of row 1 (sample 101) are not those of stored"),
    (cell("response_lengths", 0, 5), "response_lengths of row 0 (sample 100) must be 0 to 4, the"),
    (cell("response_lengths", 0, 1.5), "response_lengths of row 0 (sample 100) must be 0 to 4"),
    (cell("response_lengths", 0, 3), "response_lengths of row 0 (sample 100) is 3, but stored"),
    (cell("loss_masks", 3, [1] * 4), "loss_masks of row 3 (sample 103) needs an entry for each of"),
    (cell("loss_masks", 3, [2] * 5), "loss_masks of row 3 (sample 103) must hold 0 and 1 only"),
    (cell("loss_masks", 3, [0.5] * 5), "loss_masks of row 3 (sample 103) must hold 0 and 1 only"),
    (cell("rewards", 2, float("nan")), "rewards of row 2 (sample 102) must be a finite number, no"),
    (cell("rewards", 2, "1"), "rewards of row 2 (sample 102) must be a finite number, not '1'"),
    (cell("rewards", 2, np.ones((9, 9))), "rewards of row 2 (sample 102) must be a finite number"),
    (cell("raw_reward", 2, None), "raw_reward of row 2 (sample 102) must be a finite number"),
    (cell("truncated", 1, 2), "truncated of row 1 (sample 101) must be 0 or 1, not 2"),
    (cell("metadata", 1, "x"), "metadata of row 1 (sample 101) must be a dict or None, not 'x'"),
    (cell("rollout_log_probs", 1, [-1.0] * 3), "rollout_log_probs of row 1 (sample 101) is not th"),
    (lambda found: found | {"rollout_ids": [1, 2, 3, 4]}, "rollout_ids of row 1 is 2, which joins"),
    (lambda found: found | {"rollout_ids": [1, 1, 1, 4]}, "rollout_ids of row 2 is 1, which joins"),
    (lambda found: found | {"rollout_mask_sums": [4, 4, 4, 6]}, "rollout_mask_sums of row 3 is 6"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_cannot_be_trained_is_one_sentence(change, message):
    with pytest.raises(DataError) as caught:
        made(change(returned(samples())))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_keys_of_slime_that_are_stored_may_be_returned_as_they_are():
    stored = samples()
    for sample in stored:
        sample.rollout_routed_experts = np.arange(6).reshape(1, 3, 2)
        sample.multimodal_train_inputs = {"pixels": np.ones(3)}
    keys = ("rollout_routed_experts", "multimodal_train_inputs", "teacher_log_probs")
    assert set(keys) < set(OPTIONAL)
    same = returned(stored, **{key: [getattr(s, key) for s in stored] for key in keys})
    assert not made(same, stored).masks
    with pytest.raises(DataError, match="multimodal_train_inputs of row 0"):
        made(same, samples())
