"""Waiting for Ray actors with a deadline, and errors that say what happened there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from slime_core.errors import EngineError, FullError, SlimeError, TrainerError
from slime_core.run.logs import DETAILS
from slime_core.store.file_errors import is_full
from slime_core.waits import within

details = logging.getLogger(DETAILS)
WHO = {TrainerError: "the trainer", EngineError: "the rollout worker"}


async def answer(
    name: str, seconds: float, pending: Sequence[Any], lost: type[SlimeError]
) -> list[Any]:
    """Awaits actor calls together.

    Args:
        name: what is waited for; stands in every error.
        pending: object refs.
        lost: the error to raise if an actor died, or failed in a way that nobody foresaw.

    Raises:
        SlimeError: the error that was raised inside an actor, as its own type.
        DeadlineError: not all answered in time.
    """
    try:
        return list(await within(name, seconds, asyncio.gather(*pending)))
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SlimeError):
            raise cause from error
        details.error("%s failed:\n%s", name, error)
        if is_full(cause):
            raise FullError(f"{name} failed: no space left, free some ({cause})") from error
        raise lost(f"{name} failed: {cause!r}; its traceback is in the run's logs") from error
    except RayActorError as error:
        details.error("%s failed:\n%s", name, error)
        raise lost(
            f"{name} failed: the process of {WHO.get(lost, 'an actor')} ended (killed, or out of "
            "memory?); the run's logs have the details, and the same command goes on"
        ) from error
    except RayError as error:
        details.error("%s failed:\n%s", name, error)
        raise lost(f"{name} failed: {_first_line(error)}") from error


def _first_line(error: RayError) -> str:
    """Ray's messages go on for a page."""
    return str(error).strip().split("\n", 1)[0]
