"""What became of one attempt at a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from slime_core.errors import DataError, PluginError
from slime_core.sample import Sample, Status
from slime_core.store.codec import encode_samples
from slime_core.store.parts import DROPPED, KEPT

PER_TOKEN = ("tokens", "loss_mask", "rollout_log_probs")


@dataclass(frozen=True)
class Outcome:
    """An attempt that came to its end.

    Attributes:
        samples: the rows, rollout by rollout; fan-out siblings one after another.
        graders: [rows] digest of what gave each reward.
        verdict: one of store.parts.VERDICTS.
        reason: why it is not simply kept; metrics count by it.
    """

    samples: Sequence[Sample]
    graders: Sequence[str | None] = field(default_factory=list)
    verdict: str = KEPT
    reason: str | None = None


def dropped(samples: Sequence[Sample], graders: Sequence[str | None], reason: str) -> Outcome:
    """An attempt whose group nothing will train."""
    return Outcome(samples, graders, DROPPED, reason)


def refuse_misshapen(row: Sample, vocab_size: int | None, path: str) -> None:
    """
    Args:
        vocab_size: tokens that the model knows, None where that is not known.
        path: who made the row.

    Raises:
        PluginError: the row can be neither graded nor trained; says why.
    """
    refuse_form(row, path)
    if problem := _misshapen(row, vocab_size):
        raise PluginError(f"{path} left {row.describe()} so that {problem}")


def refuse_form(row: Sample, path: str) -> None:
    """Before anything is counted or added.

    Raises:
        PluginError: tokens or what belongs to them are no lists, or response_length is no count.
    """
    if problem := _wrong_form(row):
        raise PluginError(f"{path} left {row.describe()} so that {problem}")


def _wrong_form(row: Sample) -> str | None:
    count = row.response_length
    if not isinstance(count, (int, np.integer)) or count < 0:
        return f"its response_length is {count!r:.40}, no count of tokens"
    for name in PER_TOKEN:
        value = getattr(row, name)
        if value is None and name != "tokens":
            continue
        if not isinstance(value, (list, tuple)) and getattr(value, "ndim", 0) != 1:
            return f"its {name} is {value!r:.40}, no list"
    return None


def _misshapen(row: Sample, vocab_size: int | None) -> str | None:
    if not isinstance(row.response, str):
        return f"its response is {row.response!r:.40}, not text"
    if not isinstance(row.metadata, dict):
        return f"its metadata is {row.metadata!r:.40}, not a dict"
    if row.response_length and row.response_length >= len(row.tokens):
        return "its tokens hold the response alone; the prompt's tokens come first"
    try:
        tokens = np.asarray(row.tokens, dtype=np.int64)
        given = row.rollout_log_probs
        values = np.asarray(() if given is None else given, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        return f"its tokens or log-probs are no numbers ({error})"
    unknown = tokens[(tokens < 0) | (tokens >= (vocab_size or np.inf))]
    if len(unknown):
        known = "from 0" if vocab_size is None else f"from 0 to {vocab_size - 1}"
        return f"it has the token {unknown[0]}; the model knows those {known}"
    if not np.isfinite(values).all():
        return "its rollout_log_probs are not all finite"
    mask = () if row.loss_mask is None else row.loss_mask
    others = [one for one in mask if one not in (0, 1)]
    if others:
        return (
            f"its loss_mask holds {others[0]!r:.40}; 1 stands for a token that is trained, 0 for "
            "one that is not"
        )
    return None


def unstorable(samples: Sequence[Sample]) -> str | None:
    """Why rows that a plug-in touched cannot be stored, None where they can."""
    try:
        for sample in samples:
            sample.check_lengths()
        encode_samples(list(samples))
    except (DataError, pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError,
            KeyError, RecursionError) as error:  # fmt: skip
        return str(error)
    return None


def columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """slime's form of a dataset's evaluation."""
    return {
        "rewards": [sample.reward for sample in samples],
        "truncated": [sample.status is Status.TRUNCATED for sample in samples],
        "samples": list(samples),
    }
