"""Stage 7: score held-out prompts with the served weights, when that is due."""

from __future__ import annotations

import asyncio
import logging

from slime_core.engines.client import EngineAnswerError
from slime_core.errors import RewardError
from slime_core.evaluation.resolve import eval_datasets, eval_schedule
from slime_core.refs import Ref
from slime_core.rollout.settings import EvalJob
from slime_core.run import faults
from slime_core.run.context import RunContext
from slime_core.stages.engine_care import with_engines
from slime_core.store import layout
from slime_core.store.documents import put_document

log = logging.getLogger(__name__)


def due_evaluation(ctx: RunContext, k: int) -> bool:
    """True if the weights after iteration k (-1: the initial ones) are to be evaluated."""
    return eval_schedule(ctx.config).is_due(k + 1)


async def evaluate(ctx: RunContext, k: int, version: int) -> Ref | None:
    """Evaluates every dataset that the store lacks for the served version.

    Args:
        k: the iteration just trained, -1 before the first.
        version: iterations contained in the weights, k + 1.

    Returns:
        The last dataset's result; None without datasets.

    A dataset whose prompts or graders fail is recorded as missed, so that it can neither end a run
    nor keep it from being resumed.
    """
    faults.hold("evaluate", k)
    served = f"{ctx.state.lineage}-{version}"
    present = {
        entry.key for entry in await asyncio.to_thread(ctx.backend.list, f"{layout.EVALS}{served}/")
    }
    result = None
    with ctx.clock.time(k, "evaluate"):
        for dataset in eval_datasets(ctx.config):
            key = layout.evaluation(served, dataset.name)
            if key in present:
                result = Ref(key, "eval", k, from_store=True)
                continue
            job = EvalJob(version, served, dataset.name)
            try:
                result = await with_engines(ctx, ctx.rollout.evaluate(ctx.lease.epoch, job))
            except (RewardError, EngineAnswerError) as error:
                log.error("evaluation %s of %s is missed: %s", dataset.name, served, error)
                result = await asyncio.to_thread(_record_missed, ctx, job, key, str(error))
    return result


def _record_missed(ctx: RunContext, job: EvalJob, key: str, why: str) -> Ref:
    body = {
        "dataset": job.dataset,
        "version": job.version,
        "iteration": job.iteration,
        "metrics": {},
        "missed": why,
    }
    document = put_document(ctx.backend, key, body, owner=ctx.lease, keep_first=True)
    return Ref(key, "eval", job.iteration, digest=document.digest, from_store=document.found)
