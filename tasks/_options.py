"""Every option that tasks and flows give to Prefect, in one place.

The store decides what is done, so Prefect neither keeps results, nor caches, nor retries.
"""

from __future__ import annotations

from typing import Any, overload

from prefect import State
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run, task_run
from prefect.states import Completed

from slime_core.refs import Ref
from tasks._run import stage_name


def task_options(stage: str, numbered: bool = True) -> dict[str, Any]:
    """Options of a stage's task; `numbered` ones work on an iteration.

    No tags: Prefect asks its API for a slot before each task that has one, and fails the task
    where the API is away.
    """
    naming = {"task_run_name": _task_run_name} if numbered else {"task_run_name": stage}
    return {
        "name": stage,
        **naming,
        "persist_result": False,
        "cache_policy": NO_CACHE,
        "retries": 0,
        "log_prints": False,
    }


def flow_options(name: str, numbered: bool) -> dict[str, Any]:
    """Options of a flow; `numbered` ones are called by iteration.

    Prefect does not look at parameters: `load_config` does, and says what is wrong in a sentence.
    """
    naming = {"flow_run_name": _flow_run_name} if numbered else {}
    return {
        "name": name,
        **naming,
        "persist_result": False,
        "retries": 0,
        "log_prints": False,
        "validate_parameters": False,
    }


def iteration_of(parameters: dict[str, Any]) -> int:
    """The iteration that a task or subflow works on: its ref's, or its parameter k."""
    for value in parameters.values():
        if isinstance(value, Ref):
            return value.iteration
    return int(parameters["k"])


@overload
def as_state(ref: Ref) -> Ref | State[Ref]: ...
@overload
def as_state(ref: None) -> None: ...
def as_state(ref: Ref | None) -> Ref | State[Ref] | None:
    """What a task returns: work that was found done shows as a state of its own."""
    if ref is not None and ref.from_store:
        return Completed(name="Completed (from store)", data=ref)
    return ref


async def unwrapped(result: Any) -> Any:
    """What a task gave, also where it returned a state."""
    return await result.aresult() if isinstance(result, State) else result


def _task_run_name() -> str:
    return stage_name(task_run.task_name, iteration_of(task_run.parameters))


def _flow_run_name() -> str:
    return stage_name(flow_run.flow_name, iteration_of(flow_run.parameters))
