"""What a function made of all samples of a batch in place of the built-in conversion, checked
against the stored samples and laid over them row by row.

Stored tokens and log-probs stay: rewards, masks, truncation and metadata may be others, and rows
may be left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from slime_core.errors import DataError
from slime_core.sample import Sample

REQUIRED = ("tokens", "response_lengths", "rewards", "loss_masks")
STORED = ("rollout_log_probs", "teacher_log_probs", "multimodal_train_inputs",
          "rollout_routed_experts", "rollout_top_p_token_ids",
          "rollout_top_p_token_offsets")  # fmt: skip
OPTIONAL = ("raw_reward", "truncated", "sample_indices", "rollout_ids", "rollout_mask_sums",
            "round_number", "metadata", *STORED)  # fmt: skip

LARGEST = float(np.finfo(np.float32).max)
"""Rewards are float32 in the trainer."""


@dataclass(frozen=True)
class Converted:
    """The rows of a batch as a function wants them trained. n is the number of stored rows.

    Attributes:
        rewards: float64 [n], what advantages start from; 0 where left out.
        raw_rewards: float64 [n].
        left_out: rows that the function did not return.
        masks: uint8 [response_length] of rows whose mask is not the stored one.
        truncated: 0 or 1 of rows where the stored status says otherwise.
        metadata: `train_metadata` of rows that have another one.
    """

    rewards: np.ndarray
    raw_rewards: np.ndarray
    left_out: tuple[int, ...]
    masks: Mapping[int, np.ndarray]
    truncated: Mapping[int, int]
    metadata: Mapping[int, dict[str, Any] | None]


def converted(
    name: str, found: Any, samples: Sequence[Sample], raw: np.ndarray, rollouts: np.ndarray
) -> Converted:
    """Checks what a function returned and finds the stored row of each of its rows.

    Args:
        name: the function, for errors.
        found: dict of columns with an entry a row, by slime's names.
        samples: [n] the stored rows. The mask of a removed one stays zero.
        raw: [n] rewards as graded, where the function does not give `raw_reward`.
        rollouts: [n] rows of one rollout share a number.

    Raises:
        DataError: in one sentence, with the function, the key and the row.
    """
    columns = _columns(name, found)
    count = len(columns["tokens"])
    rows = [_Row(name, columns, i) for i in range(count)]
    places = _places(name, columns, rows, samples)
    _check_rollouts(name, columns, places, rollouts)
    rewards, raw_rewards = np.zeros(len(samples)), np.asarray(raw, dtype=np.float64).copy()
    masks: dict[int, np.ndarray] = {}
    truncated: dict[int, int] = {}
    metadata: dict[int, dict[str, Any] | None] = {}
    sums = np.zeros(len(samples))
    for row, place in zip(rows, places, strict=True):
        sample = samples[place]
        row.check_stored(sample)
        rewards[place] = row.number("rewards")
        if "raw_reward" in columns:
            raw_rewards[place] = row.number("raw_reward")
        mask, own = row.mask(sample.response_length), stored_mask(sample)
        if sample.remove_sample:
            mask = own
        sums[place] = mask.sum()
        if not np.array_equal(mask, own):
            masks[place] = mask
        if "truncated" in columns:
            cut = row.bit("truncated")
            if cut != int(sample.status is Sample.Status.TRUNCATED):
                truncated[place] = cut
        if "metadata" in columns and not _equal(row.metadata(), sample.train_metadata):
            metadata[place] = row.metadata()
    _check_sums(name, columns, places, rollouts, sums)
    left_out = tuple(sorted(set(range(len(samples))) - set(places)))
    return Converted(rewards, raw_rewards, left_out, masks, truncated, metadata)


def stored_mask(sample: Sample) -> np.ndarray:
    """uint8 [response_length]: 1 where the row is trained as it is stored."""
    if sample.remove_sample:
        return np.zeros(sample.response_length, dtype=np.uint8)
    if sample.loss_mask is None:
        return np.ones(sample.response_length, dtype=np.uint8)
    return np.asarray(sample.loss_mask, dtype=np.uint8)


class _Row:
    """One returned row."""

    def __init__(self, name: str, columns: Mapping[str, Sequence[Any]], i: int) -> None:
        self._name, self._columns, self._i = name, columns, i
        self.tokens = self._integers()
        self.response_length = self._response_length()

    def wrong(self, key: str, what: str) -> DataError:
        told = self._columns.get("sample_indices")
        sample = "" if told is None else f" (sample {told[self._i]})"
        return DataError(f"{self._name}: {key} of row {self._i}{sample} {what}")

    def check_stored(self, sample: Sample) -> None:
        """Raises DataError where something is other than stored that cannot be changed."""
        if not np.array_equal(self.tokens, sample.tokens):
            raise self.wrong("tokens", f"are not those of stored {sample.describe()}: tokens of "
                             "stored samples cannot be changed")  # fmt: skip
        if self.response_length != sample.response_length:
            raise self.wrong(
                "response_lengths", f"is {self.response_length}, but stored {sample.describe()} "
                f"has {sample.response_length}: mask tokens out with loss_masks instead",
            )  # fmt: skip
        for key in STORED:
            if key in self._columns and not _same(self._columns[key][self._i],
                                                  getattr(sample, key)):  # fmt: skip
                raise self.wrong(key, f"is not that of stored {sample.describe()}, which cannot "
                                 f"be changed: leave {key} out")  # fmt: skip

    def number(self, key: str) -> float:
        value = self._columns[key][self._i]
        try:
            number = np.asarray(value, dtype=np.float64)
        except (TypeError, ValueError, RuntimeError):  # the last from tensors with a gradient
            number = np.asarray([])
        if number.ndim or isinstance(value, str) or not np.isfinite(number):
            raise self.wrong(key, f"must be a finite number, not {_shown(value)}")
        if key == "rewards" and abs(number) > LARGEST:
            raise self.wrong(key, f"is {number:g}, more than the trainer's float32 holds")
        return float(number)

    def bit(self, key: str) -> int:
        number = self.number(key)
        if number not in (0, 1):
            raise self.wrong(key, f"must be 0 or 1, not {number:g}")
        return int(number)

    def mask(self, length: int) -> np.ndarray:
        mask = _array(self._columns["loss_masks"][self._i])
        if mask is None or mask.ndim != 1 or len(mask) != length:
            shown = "no flat list" if mask is None or mask.ndim != 1 else f"{len(mask)} entries"
            raise self.wrong("loss_masks", f"needs an entry for each of {length} response tokens "
                             f"and has {shown}")  # fmt: skip
        if mask.dtype.kind not in "biuf" or not np.isin(mask, (0, 1)).all():
            raise self.wrong("loss_masks", "must hold 0 and 1 only")
        return mask.astype(np.uint8)

    def metadata(self) -> dict[str, Any] | None:
        value = self._columns["metadata"][self._i]
        if value is not None and not isinstance(value, dict):
            raise self.wrong("metadata", f"must be a dict or None, not {_shown(value)}")
        return value

    def _integers(self) -> np.ndarray:
        tokens = _array(self._columns["tokens"][self._i])
        if tokens is None or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise self.wrong("tokens", "must be a flat list of integers")
        return tokens

    def _response_length(self) -> int:
        value = self._columns["response_lengths"][self._i]
        try:
            length = index(value)
        except TypeError:
            length = -1
        if not 0 <= length <= len(self.tokens):
            raise self.wrong("response_lengths", f"must be 0 to {len(self.tokens)}, the number of "
                             f"its tokens, not {_shown(value)}")  # fmt: skip
        return length


def _columns(name: str, found: Any) -> dict[str, Sequence[Any]]:
    """The columns that are there, all of one length."""
    if not isinstance(found, Mapping):
        raise DataError(f"{name} must return a dict of columns, not {type(found).__name__}")
    given = {key: value for key, value in found.items() if value is not None}
    if missing := [key for key in REQUIRED if key not in given]:
        raise DataError(f"{name} returned no {', '.join(missing)}: it must return "
                        f"{', '.join(REQUIRED)}")  # fmt: skip
    if unknown := [str(key) for key in given if key not in REQUIRED + OPTIONAL]:
        raise DataError(f"{name} returned {', '.join(unknown)}, which nothing here trains on; it "
                        f"may return {', '.join(REQUIRED + OPTIONAL)}")  # fmt: skip
    columns: dict[str, Sequence[Any]] = {}
    for key, value in given.items():
        flat = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(flat, (list, tuple)):
            raise DataError(f"{name}: {key} must be a list with an entry for each row, not "
                            f"{type(value).__name__}")  # fmt: skip
        columns[key] = flat
    count = len(columns["tokens"])
    if not count:
        raise DataError(f"{name} returned no row: at least one must be trained")
    for key, column in columns.items():
        if len(column) != count:
            raise DataError(f"{name}: {key} has {len(column)} entries for {count} rows of tokens")
    return columns


def _places(
    name: str, columns: Mapping[str, Sequence[Any]], rows: Sequence[_Row], samples: Sequence[Sample]
) -> list[int]:
    """The stored row of each returned one, by `sample_indices`; in order without them."""
    told = columns.get("sample_indices")
    if told is None:
        if len(rows) != len(samples):
            raise DataError(
                f"{name} returned {len(rows)} rows for {len(samples)} samples without "
                "sample_indices, which say whose they are: return the index of each row's sample"
            )
        return list(range(len(rows)))
    free: dict[Any, list[int]] = {}
    for place, sample in enumerate(samples):
        free.setdefault(sample.index, []).append(place)
    known = set(free)
    places = []
    for i, (row, given) in enumerate(zip(rows, told, strict=True)):
        at = given.item() if hasattr(given, "item") else given
        if not isinstance(at, (int, type(None))) or at not in known:
            raise DataError(f"{name}: sample_indices of row {i} is {_shown(given)}, and the batch "
                            "has no such sample: rows cannot be added")  # fmt: skip
        if not free[at]:
            raise DataError(f"{name}: sample_indices of row {i} is {at} again: each stored row is "
                            "trained once, and rows cannot be added")  # fmt: skip
        # Rows of one rollout may share the index of their sample; their tokens tell them apart.
        place = next((p for p in free[at] if np.array_equal(row.tokens, samples[p].tokens)),
                     free[at][0])  # fmt: skip
        free[at].remove(place)
        places.append(place)
    return places


def _check_rollouts(
    name: str, columns: Mapping[str, Sequence[Any]], places: Sequence[int], rollouts: np.ndarray
) -> None:
    """The function's rollouts must be the stored ones, by whatever number."""
    told = columns.get("rollout_ids")
    if told is None:
        return
    stored_of: dict[Any, int] = {}
    told_of: dict[int, Any] = {}
    for i, (given, place) in enumerate(zip(told, places, strict=True)):
        own = int(rollouts[place])
        key = ("alone", own) if given is None else str(given)
        if stored_of.setdefault(key, own) != own or told_of.setdefault(own, key) != key:
            raise DataError(
                f"{name}: rollout_ids of row {i} is {_shown(given)}, which joins or divides "
                "rollouts that were generated: leave rollout_ids out"
            )


def _check_sums(
    name: str, columns: Mapping[str, Sequence[Any]], places: Sequence[int], rollouts: np.ndarray,
    sums: np.ndarray,
) -> None:  # fmt: skip
    """`rollout_mask_sums` are made here; where they are told, they must be the same."""
    for i, (given, place) in enumerate(
        zip(columns.get("rollout_mask_sums", ()), places, strict=False)
    ):
        own = sums[rollouts == rollouts[place]].sum()
        if not np.array_equal(given, own):
            raise DataError(f"{name}: rollout_mask_sums of row {i} is {_shown(given)}, but the "
                            f"masks of its rollout sum to {own:g}")  # fmt: skip


def _array(value: Any) -> np.ndarray | None:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # the last from tensors with a gradient
        return None
    return array.astype(np.int64) if array.size == 0 else array


def _same(value: Any, stored: Any) -> bool:
    """Whether two values that may hold arrays are equal."""
    if isinstance(value, Mapping) and isinstance(stored, Mapping):
        return value.keys() == stored.keys() and all(_same(value[k], stored[k]) for k in stored)
    if value is None or stored is None:
        return value is stored
    mine, own = _array(value), _array(stored)
    return mine is not None and own is not None and np.array_equal(mine, own)


def _equal(value: Any, stored: Any) -> bool:
    """Whether two plain values are equal; False where arrays in them make that a question."""
    try:
        return bool(value == stored)
    except (ValueError, RuntimeError):
        return False


def _shown(value: Any) -> str:
    return " ".join(repr(value).split())[:60]
