"""When a checkpoint is written, and which old ones go."""

from __future__ import annotations

import asyncio
import logging

from slime_core.config.fields import identity_digest, numeric_digest
from slime_core.run.context import RunContext
from slime_core.store.cache import NodeCache
from slime_core.store.checkpoints import (
    checkpoint_directory,
    checkpoint_names,
    list_checkpoints,
    put_checkpoint,
    remove_checkpoint,
)

log = logging.getLogger(__name__)
KEPT_CHECKPOINTS = 2


def is_due(ctx: RunContext, k: int) -> bool:
    """True after the last iteration, at each save_interval, and when a replay would take longer
    than max_replay_s."""
    config = ctx.config
    interval = config.train.save_interval
    return (
        k + 1 == config.run.num_rollout
        or (interval is not None and (k + 1) % interval == 0)
        or ctx.state.trained_s > config.train.max_replay_s
    )


async def save_if_due(ctx: RunContext, k: int) -> None:
    """Writes a checkpoint of the state after iteration k, then removes all but the newest two."""
    if not is_due(ctx, k) or await asyncio.to_thread(_exists, ctx, k):
        return
    folder = await asyncio.to_thread(checkpoint_directory, ctx.cache, k, ctx.lease.epoch)
    await ctx.trainer.invoke("save", str(folder))
    await asyncio.to_thread(
        put_checkpoint,
        ctx.cache,
        ctx.lease,
        iteration=k,
        state=ctx.state.digest,
        weight_version=ctx.state.version,
        about={
            "numeric_digest": numeric_digest(ctx.config),
            "identity_digest": identity_digest(ctx.config),
            "segment": k,
        },
        by={"run_id": ctx.run_id},
    )
    ctx.state.trained_s = 0.0
    await asyncio.to_thread(remove_old, ctx.cache, KEPT_CHECKPOINTS)


def remove_old(cache: NodeCache, kept: int) -> None:
    """Removes all final checkpoints but the newest `kept`, and files that no manifest makes final.

    Call it after a manifest was written: then no checkpoint is in the making.
    """
    final = {c.key.split("/")[1] for c in list_checkpoints(cache.backend)[:kept]}
    for name in sorted(checkpoint_names(cache) - final):
        remove_checkpoint(cache, name)
        log.info("removed the old checkpoint %s", name)


def _exists(ctx: RunContext, k: int) -> bool:
    return any(
        checkpoint.iteration == k and checkpoint.state == ctx.state.digest
        for checkpoint in list_checkpoints(ctx.backend)
    )
