"""Why an iteration that is trained again may give other weights, as far as its results tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def hooks_hint(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Which functions of the user's may be the reason, in brackets; "" where none is.

    Args:
        then, now: results of an iteration (PolicyTrainer.train).
    """
    before = then.get("hooks", {})
    edited = [
        name for name, digest in now.get("hooks", {}).items() if before.get(name, digest) != digest
    ]
    if edited:
        return f" (edited since: {', '.join(edited)})"
    if then.get("postprocessed") != now.get("postprocessed"):
        return (
            " (rollout_data_postprocess_path changed other data than then: it read more than its "
            "arguments, or these differ already, as with another number of ranks)"
        )
    return ""
