"""The steps of an evaluation without a run, as Prefect tasks."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from prefect import task

from tasks._options import task_options

if TYPE_CHECKING:
    from slime_core.evaluation.standalone import Result, StandaloneEvaluation

EVALUATION: ContextVar[StandaloneEvaluation] = ContextVar("slime_evaluation")
"""What the flow evaluates; none of it is a parameter."""
BY_DATASET: dict[str, Any] = {**task_options("evaluate"), "task_run_name": "evaluate {dataset}"}


@task(**task_options("weights", numbered=False))
async def weights() -> None:
    """Write the run's weights out for the engines."""
    await EVALUATION.get().weights()


@task(**task_options("engines", numbered=False))
async def engines() -> None:
    """Start the engines on the weights."""
    await EVALUATION.get().engines()


@task(**BY_DATASET)
async def evaluate_dataset(dataset: str) -> Result:
    """Answer and grade one dataset's prompts."""
    return await EVALUATION.get().run(dataset)
