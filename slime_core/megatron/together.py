"""Local work on every rank whose failure on one of them is a failure of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from slime_core.errors import ConfigError, TrainerError
from slime_core.megatron import parallel

T = TypeVar("T")


def together(name: str, work: Callable[[], T]) -> T:
    """Does something without collectives on every rank. A collective.

    Args:
        name: what is done; stands in the error.

    Returns:
        This rank's result.

    Raises:
        ConfigError: what failed is the user's to mend, wherever it failed.
        TrainerError: it failed otherwise somewhere; names the rank.
        Either is raised on every rank, so that none waits in a later collective for one that gave
        up.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        failure = error
    told = parallel.gather_objects(
        None if failure is None else (isinstance(failure, ConfigError), _told(failure))
    )
    failed = {rank: said for rank, said in enumerate(told) if said is not None}
    if failed and all(by_user for by_user, _ in failed.values()):
        raise ConfigError(next(iter(failed.values()))[1]) from failure
    if failed:
        texts = [f"rank {rank}: {text}" for rank, (_, text) in failed.items()]
        raise TrainerError(f"{name}: {'; '.join(texts)}") from failure
    return result


def first_failure(error: CheckpointException) -> str:
    """What the first rank that failed has said. torch raises this on every rank; it is no
    Exception."""
    failed, (cause, _) = min(error.failures.items())
    return f"rank {failed}: {_told(cause) if isinstance(cause, Exception) else cause}"


def _told(error: Exception) -> str:
    return (
        str(error)
        if isinstance(error, (ConfigError, TrainerError))
        else f"{type(error).__name__}: {error}"
    )
