"""Python's garbage collector in a process that reads many answers."""

from __future__ import annotations

import gc

YOUNG = 50_000


def settle_heap() -> None:
    """Takes what was imported and loaded so far out of the collector's sight, and lets it look less
    often at the rest.

    An answer of 512 tokens is a thousand small objects: with the usual threshold each one starts
    collections, and every few of them a walk over all of torch and transformers.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 20)
