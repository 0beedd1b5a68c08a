"""The grader `reasoning_gym`: each task is scored as its own generator in that library does it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from slime_core.errors import ConfigError, RewardError
from slime_core.rewards.text import after_thinking

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def require_library() -> None:
    """Raises ConfigError where reasoning-gym is not installed."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError(
            "rm_type reasoning_gym needs the extra: pip install 'slime-flow[reasoning]'"
        )


def grade_reasoning_gym(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """What the task's generator says of an answer, from 0 to 1.

    The answer is what stands in the last <answer>, else all that follows the reasoning. Prompts are
    rows of the library: `metadata` is an entry's, with `source_dataset`, or the whole entry.

    Raises:
        RewardError: the entry names no task, or the answer is missing.
    """
    entry = _entry(label, metadata)
    text = after_thinking(response)
    tagged = TAGGED.findall(text)
    scorer = _scorer(str(entry["metadata"]["source_dataset"]))
    return float(scorer((tagged[-1] if tagged else text).strip(), entry))


def _entry(label: str | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
    inner = metadata.get("metadata")
    about = inner if isinstance(inner, Mapping) else metadata
    if "source_dataset" not in about:
        raise RewardError("reasoning_gym needs metadata['source_dataset'], the name of the task")
    answer = label if label is not None else metadata.get("answer")
    return {"question": metadata.get("question"), "answer": answer, "metadata": dict(about)}


@lru_cache(maxsize=256)
def _scorer(task: str) -> Callable[..., float]:
    from reasoning_gym import get_score_answer_fn

    try:
        return get_score_answer_fn(task)
    except ValueError as error:
        raise RewardError(f"reasoning_gym has no task {task!r}") from error
