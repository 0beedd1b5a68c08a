"""Which positions of a sequence each context-parallel rank holds (zigzag).

A sequence is cut into 2 * cp chunks of equal size; rank r holds chunks r and 2 * cp - 1 - r, so
that under a causal mask early (cheap) and late (dear) chunks even out.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.errors import ConfigError, DataError

Range = tuple[int, int]


@dataclass(frozen=True)
class RankRanges:
    """What one rank holds of a sequence; all ranges half open, (0, 0) where empty.

    Attributes:
        chunk: positions a chunk; the last chunks may reach beyond the sequence, into padding.
        chunks: the two position ranges.
        logits: positions within each chunk whose logits predict a response token.
        tokens: the positions of those response tokens (one further).
    """

    chunk: int
    chunks: tuple[Range, Range]
    logits: tuple[Range, Range]
    tokens: tuple[Range, Range]


def zigzag_ranges(total: int, response: int, cp_size: int, rank: int) -> RankRanges:
    """The share of one rank. Over all ranks every response token is owned exactly once.

    Args:
        total: tokens of the sequence.
        response: response tokens at its end, fewer than total.
        cp_size: context-parallel size.
        rank: 0..cp_size - 1.
    """
    if cp_size < 1 or not 0 <= rank < cp_size:
        raise ConfigError(f"context-parallel rank {rank} does not exist among {cp_size}")
    if not 0 <= response < total:
        raise DataError(
            f"a sequence of {total} tokens cannot have {response} response tokens: at least one "
            "prompt token must come before them"
        )
    chunk = -(-total // (2 * cp_size))
    starts = (rank * chunk, (2 * cp_size - 1 - rank) * chunk)
    chunks = ((starts[0], starts[0] + chunk), (starts[1], starts[1] + chunk))
    predicting = (total - response - 1, total - 1)
    logits = (_overlap(chunks[0], predicting), _overlap(chunks[1], predicting))
    tokens = (_next(logits[0]), _next(logits[1]))
    return RankRanges(chunk, chunks, logits, tokens)


def _overlap(a: Range, b: Range) -> Range:
    start, end = max(a[0], b[0]), min(a[1], b[1])
    return (start, end) if start < end else (0, 0)


def _next(part: Range) -> Range:
    return (part[0] + 1, part[1] + 1) if part != (0, 0) else part
