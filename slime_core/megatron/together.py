"""Local work on every rank whose failure on one of them is a failure of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from slime_core.errors import ConfigError, FullError, TrainerError
from slime_core.megatron import parallel
from slime_core.store.file_errors import is_full

T = TypeVar("T")


def together(name: str, work: Callable[[], T]) -> T:
    """Does something without collectives on every rank. A collective.

    Args:
        name: what is done; stands in the error.

    Returns:
        This rank's result.

    Raises:
        ConfigError: what failed is the user's to mend, wherever it failed.
        FullError: a disk is full.
        TrainerError: it failed otherwise somewhere; names the rank.
        Any of them is raised on every rank, so that none waits in a later collective for one that
        gave up.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        failure = error
    told = parallel.gather_objects(None if failure is None else (_to_mend(failure), _told(failure)))
    failed = {rank: said for rank, said in enumerate(told) if said is not None}
    if not failed:
        return result
    kinds = {kind for kind, _ in failed.values()}
    if kinds == {ConfigError.__name__}:
        raise ConfigError(next(iter(failed.values()))[1]) from failure
    text = "; ".join(f"rank {rank}: {said}" for rank, (_, said) in failed.items())
    if kinds == {FullError.__name__}:
        raise FullError(f"{name}: no space left, free some ({text})") from failure
    raise TrainerError(f"{name}: {text}") from failure


def _to_mend(failure: Exception) -> str:
    """The error by which all ranks say this, where it is no fault of the trainer."""
    if is_full(failure):
        return FullError.__name__
    return ConfigError.__name__ if isinstance(failure, ConfigError) else ""


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
