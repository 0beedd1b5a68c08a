"""Responses of supervised conversations, from masks over whole sequences."""

from __future__ import annotations

from collections.abc import Sequence


def response_length(loss_mask: Sequence[int]) -> int:
    """Tokens from the first trained one to the end; 0 if none is trained.

    Args:
        loss_mask: 0 or 1 for every token of the sequence.
    """
    for position, trained in enumerate(loss_mask):
        if trained:
            return len(loss_mask) - position
    return 0
