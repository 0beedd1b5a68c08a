"""Calls to Prefect's API that a run can do without: names, marks, late reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas import filters
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Crashed, Failed, Running

from flows.server import api_answers
from slime_core.run.ending import Ending

log = logging.getLogger(__name__)
API_ERRORS = (httpx.HTTPError, ObjectNotFound, ConcurrencySlotAcquisitionError)
UNFINISHED = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
PAGE = 200
RUN_TAG = "run:"
DEAD = "the process of this run is gone; a retry of this flow run, or `slime resume`, goes on"
GONE = "the process of this run is gone; the run went on in another flow run"
STOPPED = "stopped by a person; the same command goes on"
FINISHED = "its process was killed after the last iteration, when nothing was left to do"
PAUSED, BACK = "Paused", "the store can be used again"
LATE = "reported late: Prefect was away when this ended"


@dataclass
class Shown:
    """What Prefect shows of the current run.

    Attributes:
        parent: flow run of the training.
        current: subflow run of the current iteration.
        finished: that iteration's stages are done.
        failure: what that iteration's stages raised.
        away: the API failed or did not answer, so that ends may be missing there.
    """

    parent: UUID
    current: UUID | None = None
    finished: bool = False
    failure: BaseException | None = None
    away: bool = False

    def expect(self) -> None:
        """Forgets the iteration before."""
        self.current, self.finished, self.failure = None, False, None

    def begin(self) -> None:
        """Notes the subflow run that has just begun."""
        self.current = UUID(str(flow_run.id))


SHOWN: ContextVar[Shown] = ContextVar("slime_shown")


def shown() -> Shown:
    """Of the current parent flow."""
    return SHOWN.get()


async def reachable() -> bool:
    """True if the API answers within a second."""
    url = PREFECT_API_URL.value()
    return url is None or await asyncio.to_thread(api_answers, url)


async def announce(run_id: str) -> UUID:
    """Names the parent flow's run after the training and tags it, so that a resume finds it.

    Returns:
        Id of the flow run.
    """
    own = UUID(str(flow_run.id))
    async with _forgiving("naming the flow run") as client:
        tags = {*flow_run.tags, f"{RUN_TAG}{run_id}"}
        await client.update_flow_run(own, name=run_id, tags=tags)
    return own


async def crash_unfinished(run_id: str) -> int:
    """Marks what earlier processes of this training left unfinished as crashed.

    Prefect matches subflows by the order of their calls when a flow run is retried, so one that
    still counts as running would be taken for another iteration.

    Returns:
        How many flow runs and task runs were marked.
    """
    own = UUID(str(flow_run.id))
    marked = 0
    async with _forgiving("marking crashed runs") as client:
        earlier = await _flow_runs(
            client, tags=filters.FlowRunFilterTags(all_=[f"{RUN_TAG}{run_id}"])
        )
        parents = [run.id for run in earlier if run.id != own]
        marked = await _end(client, parents, [own, *parents], Crashed(message=GONE))
    return marked


async def end_dead(
    is_dead: Callable[[str], bool],
    is_orphan: Callable[[UUID], bool],
    noted: Callable[[str, UUID], Ending | None] = lambda run_id, flow_run: None,
) -> list[tuple[str, str]]:
    """Sets the end of flow runs whose process is gone and that nobody has taken up since: as it
    was noted where Prefect was away then, else crashed.

    Args:
        is_dead: tells by the training's id whether its last owner is proven to be gone.
        is_orphan: tells of a deployment's flow run whether its process is proven to be gone, also
            where it never came to a training.
        noted: how a training's process ended, by its id and its flow run.

    Returns:
        (training, or name of the flow run that has none; crashed, finished, interrupted or failed).
    """
    found: list[tuple[str, str]] = []
    async with get_client() as client:
        alone = filters.FlowRunFilterParentTaskRunId(is_null_=True)
        for run in await _flow_runs(client, parent_task_run_id=alone):
            names = [tag.removeprefix(RUN_TAG) for tag in run.tags if tag.startswith(RUN_TAG)]
            if run.state is None or run.state.is_scheduled():
                continue
            orphan = run.deployment_id is not None and is_orphan(run.id)
            if orphan or (names and is_dead(names[0])):
                how = noted(names[0], run.id) if names else None
                await _end(client, [run.id], [run.id], _inner_end(how))
                if how is not None:
                    await client.set_flow_run_state(run.id, _late_state(how), force=True)
                found.append((names[0] if names else run.name, how or "crashed"))
    return found


async def settle_lost(own: UUID, state: State[Any] | None = None) -> int:
    """Marks what is unfinished below a flow run as completed (or as in `state`): its subflows that
    ended while the API was away (or went on without it, where they had only been created), and task
    runs whose end went with a server that was killed. To be called between iterations, when none of
    them is at work.

    Returns:
        How many flow runs and task runs were marked.

    Raises:
        API_ERRORS: the API failed.
    """
    async with get_client() as client:
        return await _end_below(client, [own], [own], state or Completed(message=LATE))


async def complete_finished(run_id: str) -> int:
    """Marks what a training left unfinished that was killed after its last iteration as completed.

    Returns:
        How many flow runs and task runs were marked.
    """
    async with _forgiving("marking a finished run as completed") as client:
        tag = filters.FlowRunFilterTags(all_=[f"{RUN_TAG}{run_id}"])
        parents = [run.id for run in await _flow_runs(client, tags=tag)]
        if parents:
            return await _end(client, parents, parents, Completed(message=FINISHED))
    return 0


def _inner_end(how: Ending | None) -> State[Any]:
    """What was unfinished in Prefect below a run that has ended."""
    return Completed(message=LATE) if how == "finished" else Crashed(message=DEAD)


def _late_state(how: Ending) -> State[Any]:
    if how == "finished":
        return Completed(message=LATE)
    return Cancelled(message=STOPPED) if how == "interrupted" else Failed(message=LATE)


async def _end(
    client: PrefectClient, parents: Sequence[UUID], owners: Sequence[UUID], state: State[Any]
) -> int:
    """Sets the state of parents, what is unfinished below `owners`, and all their task runs."""
    below = await _end_below(client, parents, owners, state)
    for parent in parents:
        await client.set_flow_run_state(parent, state, force=True)
    return below + len(parents)


async def _end_below(
    client: PrefectClient, parents: Sequence[UUID], owners: Sequence[UUID], state: State[Any]
) -> int:
    """The same without the parents themselves."""
    children = await _flow_runs(
        client,
        parent_flow_run_id=filters.FlowRunFilterParentFlowRunId(any_=list(owners)),
    )
    task_runs = await _task_runs(client, parents, owners)
    for task_run in task_runs:
        await client.set_task_run_state(task_run, state, force=True)
    for child in children:
        await client.set_flow_run_state(child.id, state, force=True)
    return len(task_runs) + len(children)


async def mark_stopped(run: UUID) -> None:
    """Shows a run that a person stopped as cancelled, which Prefect took for a crash."""
    async with _forgiving("marking the run as cancelled") as client:
        await client.set_flow_run_state(run, Cancelled(message=STOPPED), force=True)


async def show_pause(run: UUID, why: str | None) -> None:
    """Shows that a run waits for its store, or (with None) that it goes on. The type stays Running:
    Prefect would end a paused run by itself, or let it be resumed in another process."""
    if not await reachable():
        return
    state = Running(message=BACK) if why is None else Running(name=PAUSED, message=why)
    async with _forgiving("showing a pause") as client:
        shown = (await client.read_flow_run(run)).state
        if shown is not None and shown.is_running():  # else somebody cancels it
            await client.set_flow_run_state(run, state, force=True)


async def report_late(state: Shown, *, failed: bool = False) -> None:
    """Tells Prefect what it missed while it was away, if it answers again.

    Args:
        failed: the run ends with an error, by which the iteration ended that is shown last, if the
            error was not that of one that is not shown.
    """
    if not state.away or not await reachable():
        return
    try:
        inside = failed and state.current is not None and not state.finished
        await settle_lost(state.parent, Failed(message=LATE) if inside else None)
        state.away = False
    except API_ERRORS as error:
        log.warning("Prefect failed at late reports: %s", error)


@asynccontextmanager
async def _forgiving(what: str) -> AsyncIterator[PrefectClient]:
    """A client whose errors are logged: the run goes on."""
    try:
        async with get_client() as client:
            yield client
    except API_ERRORS as error:
        log.warning("Prefect failed at %s: %s", what, error)


async def _flow_runs(client: PrefectClient, **condition: object) -> list[FlowRun]:
    """All unfinished flow runs under a condition."""
    state = filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=UNFINISHED))
    wanted = filters.FlowRunFilter.model_validate({"state": state, **condition})
    found: list[FlowRun] = []
    while page := await client.read_flow_runs(
        flow_run_filter=wanted, limit=PAGE, offset=len(found)
    ):
        found += page
    return found


async def _task_runs(
    client: PrefectClient, parents: Sequence[UUID], owners: Sequence[UUID]
) -> list[UUID]:
    """Ids of all unfinished task runs of `parents` and of all subflow runs below `owners`, also of
    finished ones: the end of a task run is lost with a server that is killed before it wrote it."""
    state = filters.TaskRunFilterState(type=filters.TaskRunFilterStateType(any_=UNFINISHED))
    places = [
        filters.FlowRunFilter(
            parent_flow_run_id=filters.FlowRunFilterParentFlowRunId(any_=list(owners))
        )
    ]
    if parents:
        places.append(filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=list(parents))))
    found: list[UUID] = []
    for place in places:
        of_place: list[UUID] = []
        while page := await client.read_task_runs(
            flow_run_filter=place,
            task_run_filter=filters.TaskRunFilter(state=state),
            limit=PAGE,
            offset=len(of_place),
        ):
            of_place += [run.id for run in page]
        found += of_place
    return found
