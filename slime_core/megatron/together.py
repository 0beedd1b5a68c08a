"""Local work on every rank whose failure on one of them is a failure of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from slime_core.errors import TrainerError
from slime_core.megatron import parallel

T = TypeVar("T")


def together(name: str, work: Callable[[], T]) -> T:
    """Does something without collectives on every rank. A collective.

    Args:
        name: what is done; stands in the error.

    Returns:
        This rank's result.

    Raises:
        TrainerError: it failed somewhere; names the rank. Raised on every rank, so that none waits
            in a later collective for one that gave up.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        failure = error
    told = parallel.gather_objects("" if failure is None else _told(failure))
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
    if failed:
        raise TrainerError(f"{name}: {'; '.join(failed)}") from failure
    return result


def first_failure(error: CheckpointException) -> str:
    """What the first rank that failed has said. torch raises this on every rank; it is no
    Exception."""
    failed, (cause, _) = min(error.failures.items())
    return f"rank {failed}: {_told(cause) if isinstance(cause, Exception) else cause}"


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, TrainerError) else f"{type(error).__name__}: {error}"
