"""A training that Prefect starts: from a deployment's parameters to the state that it ends in."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import State
from prefect.exceptions import Abort
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed

from blocks.resolve import resolve
from flows.cancelled import has_worker, is_cancelled
from flows.launch import Launch, choose
from flows.parameters import as_text, as_tree
from flows.prefect_api import RUN_TAG
from flows.services.environment import WORKSPACE
from flows.stop import Stopper
from slime_core.check.inspection import require
from slime_core.config.loading import load_config
from slime_core.config.tree import RunConfig, RunGroup
from slime_core.run.paths import RunPaths

log = logging.getLogger(__name__)
STOPPED = "stopped; a retry of this flow run, or `slime resume`, goes on"
CLEAN_END_S = 25.0
"""Longer than a start that must come to its end before it can be undone; shorter than a worker that
is told to end, or was told to cancel, waits for its flows."""


async def deployed(
    config: RunConfig | dict[str, Any],
    overrides: dict[str, Any],
    resume: str,
    training: Callable[[Launch], Awaitable[None]],
) -> State[None]:
    """Starts the processes of a run in this one, trains, and ends them.

    Args:
        config, overrides, resume: parameters of the flow; Prefect has not looked at them.
        training: what is done once the processes are starting.

    Returns:
        Completed, or Cancelled where a signal or a cancel stopped it.

    Raises:
        Abort: Prefect was told to cancel it, and its worker will say so.
        ConfigError: a parameter that cannot work, before anything was started.
        SlimeError: what stopped the run.
    """
    parent = os.getppid()
    with _signals() as stopper:
        given = configuration(config, overrides)
        resolved = await resolve(given)
        os.environ.update(resolved.environment)
        for note in require(resolved.config):
            log.info("%s", note)
        choice = choose(resolved.config, _which(as_text("resume", resume)))
        log.info("%s", choice.sentence)
        if choice.finished:
            return Completed(message=choice.sentence)
        _leave_the_workers_pipes(RunPaths.create(resolved.config.run.workspace, choice.run_id).logs)
        launch: Launch | None = None
        try:
            if _is_stopped(stopper):
                raise asyncio.CancelledError
            launch = Launch.start(resolved.config, resume, choice=choice, recorded=given)
            task = asyncio.ensure_future(training(launch))
            if stopper is not None:
                stopper.watch(task, launch.release)
            await task
        except (Exception, asyncio.CancelledError) as error:
            # What a stop tears down may complain in many ways: the stop is what happened.
            if not _is_stopped(stopper):
                raise
            log.info("the run was stopped (%r)", error)
            if has_worker(parent) and await is_cancelled(UUID(str(flow_run.id))):
                # The worker sets the state when this process has ended. Were it set now, a retry
                # that comes at once would be undone by the worker.
                raise Abort("cancelled; the worker says so") from error
            return Cancelled(message=STOPPED)
        finally:
            if stopper is not None:
                stopper.unwatch()
            if launch is not None:
                await launch.close("interrupted" if _is_stopped(stopper) else "failed")
    return Completed(message=f"run {choice.run_id} is finished")


def configuration(config: RunConfig | dict[str, Any], overrides: dict[str, Any]) -> RunConfig:
    """The checked configuration; the default workspace is that of the services."""
    tree = config.model_dump() if isinstance(config, RunConfig) else as_tree("config", config)
    made = load_config(tree, as_tree("overrides", overrides))
    workspace = os.environ.get(WORKSPACE)
    if workspace and made.run.workspace == RunGroup.model_fields["workspace"].default:
        return load_config(made.model_dump(), {"workspace": workspace})
    return made


def _which(resume: str) -> str:
    """A retry of a flow run means the training that it had."""
    if (flow_run.run_count or 0) > 1:
        for tag in flow_run.tags or []:
            if tag.startswith(RUN_TAG):
                return tag.removeprefix(RUN_TAG)
    return resume


def _leave_the_workers_pipes(logs: Path) -> None:
    """Writes what this process prints to a file of the run instead of to its worker.

    A run outlives its worker, but the console of Prefect ends a process that prints into a pipe
    without a reader.
    """
    if "PREFECT__FLOW_RUN_ID" not in os.environ:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with (logs / "prefect.log").open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


@contextmanager
def _signals() -> Iterator[Stopper | None]:
    """Takes the signals where that is possible: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    with Stopper(at_once=False, clean_end_s=CLEAN_END_S) as stopper:
        yield stopper


def _is_stopped(stopper: Stopper | None) -> bool:
    """Whether a signal has come."""
    return stopper is not None and stopper.exit_code is not None
