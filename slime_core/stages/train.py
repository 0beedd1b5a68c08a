"""Stage 5: train the batch exactly once, write the ledger, save checkpoints when due."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from time import monotonic
from typing import Any

from slime_core.config.fields import numeric_digest
from slime_core.errors import DigestError, TrainerError
from slime_core.refs import Ref
from slime_core.run import faults
from slime_core.run.checkpoints import save_if_due
from slime_core.run.context import RunContext
from slime_core.run.restore import restore_trainer
from slime_core.run.training import train_call
from slime_core.store.ledger import Ledger, next_state, put_ledger, read_ledger

log = logging.getLogger(__name__)
REBUILDS_PER_STAGE = 1


async def train(ctx: RunContext, batch: Ref) -> Ref:
    """Returns the ledger of the iteration, trained now or before.

    Raises:
        TrainerError: the trainer failed more often than its budget, or too many iterations in a
            row skipped a step.
    """
    k = batch.iteration
    faults.hold("train", k)
    with ctx.clock.time(k, "train"):
        ledger = await _train(ctx, batch)
    if any(ledger.forced_skips):
        await asyncio.to_thread(_check_skips, ctx, ledger)
    with ctx.clock.time(k, "save"):
        await save_if_due(ctx, k)
    return ledger.ref()


async def _train(ctx: RunContext, batch: Ref) -> Ledger:
    k = batch.iteration
    found = await asyncio.to_thread(read_ledger, ctx.backend, k)
    if found is not None:
        if found.batch_digest != batch.digest:
            raise DigestError(f"the ledger of iteration {k} was trained on another batch")
        if ctx.state.digest != found.state:
            await restore_trainer(ctx, k, rebuild=True)
        return replace(found, found=True)
    numeric = numeric_digest(ctx.config)
    following = next_state(ctx.state.digest, batch.digest, numeric)
    start = monotonic()
    result = await _apply(ctx, batch, following)
    ctx.state.trained_s += monotonic() - start
    seconds = result.pop("seconds", {})
    ledger = await asyncio.to_thread(
        put_ledger,
        ctx.backend,
        ctx.lease,
        iteration=k,
        parent=ctx.state.digest,
        batch_digest=batch.digest,
        numeric_digest=numeric,
        weight_version=f"{ctx.state.lineage}-{k + 1}",
        result=result,
        by={**ctx.by(k), "train_seconds": seconds, "wall_s": monotonic() - start},
    )
    ctx.state.digest, ctx.state.iterations = following, k + 1
    return ledger


async def _apply(ctx: RunContext, batch: Ref, following: str) -> dict[str, Any]:
    """The result of training the batch once, from a trainer that may fail and be rebuilt."""
    call = train_call(ctx, batch.iteration, batch.digest, ctx.state.digest, following)
    for rebuilds_left in reversed(range(REBUILDS_PER_STAGE + 1)):
        try:
            status = await ctx.trainer.status()
            if status["state"] == following:
                kept = await ctx.trainer.result_of(following)
                if kept is not None:
                    return dict(kept)
            if status["state"] != ctx.state.digest:
                raise TrainerError(f"the trainer is at another state than {ctx.state.digest[:12]}")
            return dict(await ctx.trainer.train(call))
        except TrainerError as error:
            if not rebuilds_left:
                raise
            log.warning("iteration %d: %s; rebuilding the trainer", batch.iteration, error)
            await restore_trainer(ctx, batch.iteration - 1, rebuild=True)
    raise AssertionError("the loop above returns or raises")


def _check_skips(ctx: RunContext, last: Ledger) -> None:
    """Stops a run whose steps are not finite again and again, restarts or not."""
    limit = ctx.config.train.skipped_steps_limit
    before = range(last.iteration - limit + 1, last.iteration)
    if before.start < 0:
        return
    ledgers = [read_ledger(ctx.backend, k) for k in before]
    if all(ledger is not None and any(ledger.forced_skips) for ledger in ledgers):
        raise TrainerError(
            f"{limit} iterations in a row had a NaN or Inf step (the last is {last.iteration}): "
            "look at the data of these iterations, or lower lr"
        )
