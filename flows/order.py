"""The order of a run: recover, then iterations of seven stages. Whoever shows it is passed in."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from slime_core.store import layout
from tasks._run import Bound, bound, patiently, run_stage, stage_name

if TYPE_CHECKING:
    from slime_core.run.recover import Recovery

log = logging.getLogger(__name__)
StageCall = Callable[..., Awaitable[Any]]
IterationCall = Callable[[int], Awaitable[None]]
LEAVE_S = 60.0


async def training(
    run: Bound, recovery: Recovery, stage: StageCall, iteration: IterationCall
) -> None:
    """Trains from where recovery ended to the last iteration.

    Args:
        run: the bound run.
        recovery: says which iteration is next.
        stage: calls a stage, as `run_stage` does.
        iteration: calls an iteration.
    """
    first, end = recovery.next_iteration, run.context.config.run.num_rollout
    await _evaluate_if_due(run, first - 1, stage)
    run.report.start()
    for k in range(first, end):
        if run.stop_asked():
            await _leave()
        await iteration(k)


async def stages_of(k: int, stage: StageCall) -> dict[str, float]:
    """The stages of iteration k in their order, up to the batch where there is no trainer; returns
    its metrics."""
    run = bound()
    draws = await stage("sample", k, k)
    seal = await stage("generate", k, draws)
    scored = await stage("reward", k, seal)
    batch = await stage("pack", k, scored)
    if not run.context.config.debug.debug_rollout_only:
        ledger = await stage("train", k, batch)
        await stage("sync", k, ledger)
    outbox = run.context.outbox
    metrics = await _noted(k, lambda: outbox.iteration(k))
    metrics |= await _evaluate_if_due(run, k, stage)
    run.report.iteration(k, metrics)
    return metrics


async def _noted(k: int, project: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Brings what the store holds to the metrics."""

    async def work() -> dict[str, float]:
        return await asyncio.to_thread(project)

    return await patiently(stage_name("metrics", k), work)


async def _leave() -> None:
    """Ends this process as SIGTERM does; that cancels the run while this waits."""
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(LEAVE_S)


async def plain_iteration(k: int) -> None:
    """Iteration k without Prefect."""
    await stages_of(k, run_stage)


async def _evaluate_if_due(run: Bound, k: int, stage: StageCall) -> dict[str, float]:
    """Evaluates the weights that contain k + 1 iterations, where the configuration asks for it."""
    if not run.stages.due_evaluation(run.context, k):
        return {}
    await stage("evaluate", k, k, k + 1)
    version = f"{run.context.state.lineage}-{k + 1}"
    outbox = run.context.outbox
    metrics = await _noted(k, lambda: outbox.evaluations(f"{layout.EVALS}{version}/"))
    run.report.evaluation(metrics)
    return metrics
