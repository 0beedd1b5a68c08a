"""What a person reads when something fails inside an actor."""

from __future__ import annotations

import asyncio
import logging

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from slime_core.cluster.calls import answer
from slime_core.errors import ConfigError, FullError, TrainerError


async def failing(error: Exception) -> None:
    raise error


def raised(error: Exception) -> Exception:
    with pytest.raises(Exception) as found:
        asyncio.run(answer("the trainer to be built", 5, [failing(error)], TrainerError))
    return found.value


def test_our_own_errors_keep_their_type_and_words() -> None:
    remote = RayTaskError("setup", "a page of traceback", ConfigError("lr is negative"))
    assert isinstance(raised(remote), ConfigError) and str(raised(remote)) == "lr is negative"


def test_a_foreign_error_is_one_line_and_its_traceback_goes_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    remote = RayTaskError("setup", "first page\nof a traceback", KeyError("embed"))
    with caplog.at_level(logging.ERROR):
        error = raised(remote)
    assert isinstance(error, TrainerError)
    assert str(error).startswith("the trainer to be built failed: KeyError('embed')")
    assert "\n" not in str(error) and "of a traceback" in caplog.text


def test_a_full_disk_is_one_to_wait_for() -> None:
    remote = RayTaskError("save", "a page", OSError(28, "No space left on device", "/x"))
    assert isinstance(raised(remote), FullError)
    assert "the trainer to be built failed: no space left, free some" in str(raised(remote))


def test_a_dead_process_is_one_line() -> None:
    error = raised(ActorDiedError())
    assert str(error) == (
        "the trainer to be built failed: the process of the trainer ended (killed, or out of "
        "memory?); the run's logs have the details, and the same command goes on"
    )


def test_an_actor_out_of_reach_is_one_line() -> None:
    error = raised(ActorUnavailableError("The actor died.\nPage two.\nPage three.", b"\0" * 16))
    assert isinstance(error, TrainerError) and "\n" not in str(error)
    assert "Page three" not in str(error)
