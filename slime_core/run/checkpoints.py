"""When a checkpoint is written, how, and which old ones go.

With `async_save` the ranks copy what is to be saved and train on while a thread of each writes it.
It counts from its manifest on, as any other; until then the one before is kept.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from slime_core.config.fields import identity_digest, numeric_digest
from slime_core.errors import AwayError, SlimeError
from slime_core.run import faults
from slime_core.run.best import best_checkpoint
from slime_core.run.context import RunContext
from slime_core.store.cache import NodeCache
from slime_core.store.checkpoints import (
    checkpoint_directory,
    checkpoint_names,
    list_checkpoints,
    put_checkpoint,
    remove_checkpoint,
)
from slime_core.waits import apoll

log = logging.getLogger(__name__)
KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds, as it was when it was begun.

    Attributes:
        trained_s: seconds that a resume need not repeat once it is final.
        builds: how often the ranks had been built.
    """

    iteration: int
    state: str
    weight_version: str
    trained_s: float
    builds: int

    @classmethod
    def of(cls, ctx: RunContext, k: int) -> Saved:
        """The present state, after iteration k."""
        state = ctx.state
        return cls(k, state.digest, state.version, state.trained_s, ctx.trainer.builds)


@dataclass(frozen=True)
class SaveBeside:
    """A checkpoint whose files are being written while training goes on."""

    saved: Saved
    task: asyncio.Task[None]


def is_due(ctx: RunContext, k: int) -> bool:
    """True after the last iteration, at each save_interval, when a replay would take longer than
    max_replay_s, and after a save that failed because the store was away."""
    return (
        ctx.owes_checkpoint
        or _is_due_by_number(ctx, k)
        or ctx.state.trained_s > ctx.config.train.max_replay_s
    )


def _is_due_by_number(ctx: RunContext, k: int) -> bool:
    interval = ctx.config.train.save_interval
    last = k + 1 == ctx.config.run.num_rollout
    return last or (interval is not None and (k + 1) % interval == 0)


async def save_if_due(ctx: RunContext, k: int) -> None:
    """Writes a checkpoint of the state after iteration k, then removes all but the newest two and
    the best one.

    Raises:
        TrainerError: this save, or one that was written beside training, has failed.
    """
    if ctx.saving is not None and (ctx.saving.task.done() or _is_due_by_number(ctx, k)):
        await settle(ctx)
    if ctx.saving is not None or not is_due(ctx, k) or await asyncio.to_thread(_exists, ctx, k):
        return
    saved = Saved.of(ctx, k)
    await _export(ctx, k)
    folder = str(await asyncio.to_thread(checkpoint_directory, ctx.cache, k, ctx.lease.epoch))
    if not ctx.config.train.async_save:
        await ctx.trainer.invoke("save", folder)
        await _commit(ctx, saved)
        return
    await ctx.trainer.invoke("begin_save", folder)
    task = asyncio.create_task(_finish(ctx, saved), name=f"checkpoint {k}")
    task.add_done_callback(lambda t: t.cancelled() or t.exception())  # a stop does not ask for it
    ctx.saving = SaveBeside(saved, task)
    if k + 1 == ctx.config.run.num_rollout:
        await settle(ctx)


async def settle(ctx: RunContext) -> None:
    """Waits for the checkpoint that is written beside training, if there is one.

    Raises:
        SlimeError: it failed. Where the ranks were built anew meanwhile, it went with the old ones
            and is only logged: nothing is lost, since the one before it stands.
    """
    if ctx.saving is None:
        return
    beside, ctx.saving = ctx.saving, None
    try:
        await beside.task
    except AwayError:
        ctx.owes_checkpoint = True  # the next is due at once, whatever its number
        raise
    except SlimeError as error:
        if beside.saved.builds == ctx.trainer.builds:
            raise
        log.warning(
            "the checkpoint of iteration %d went with the ranks that wrote it: %s",
            beside.saved.iteration, error,
        )  # fmt: skip


async def _finish(ctx: RunContext, saved: Saved) -> None:
    k = saved.iteration

    async def written() -> bool | None:
        return await ctx.trainer.save_written() or None

    limit_s = ctx.config.fault_tolerance.stage_timeout_s
    await apoll(f"the files of checkpoint {k} to be written", limit_s, written, 0.1)
    await asyncio.to_thread(faults.hold, "save-written", k)
    await ctx.trainer.invoke("finish_save")
    await _commit(ctx, saved)


async def _commit(ctx: RunContext, saved: Saved) -> None:
    """Makes the checkpoint count."""
    await asyncio.to_thread(
        put_checkpoint,
        ctx.cache,
        ctx.lease,
        iteration=saved.iteration,
        state=saved.state,
        weight_version=saved.weight_version,
        about={
            "numeric_digest": numeric_digest(ctx.config),
            "identity_digest": identity_digest(ctx.config),
            "segment": saved.iteration,
        },
        by={"run_id": ctx.run_id},
    )
    ctx.owes_checkpoint = False
    ctx.state.trained_s = max(0.0, ctx.state.trained_s - saved.trained_s)
    train = ctx.config.train
    await asyncio.to_thread(
        remove_old, ctx.cache, KEPT_CHECKPOINTS, train.save_best_metric, train.save_best_lowest
    )


async def _export(ctx: RunContext, k: int) -> None:
    """Writes the weights as a Hugging Face folder, where that is asked for. Before the checkpoint,
    so that a resume repeats what a kill between the two left out."""
    template = ctx.config.train.save_hf
    if template is None:
        return
    folder = Path(template.format(rollout_id=k)).absolute()
    await asyncio.to_thread(folder.parent.mkdir, parents=True, exist_ok=True)
    await ctx.trainer.invoke("export_hf", str(folder), ctx.state.version)
    log.info("iteration %d: weights %s are in %s", k, ctx.state.version, folder)


def remove_old(
    cache: NodeCache, kept: int, metric: str | None = None, lowest: bool = False
) -> None:
    """Removes all final checkpoints but the newest `kept`, and files that no manifest makes final.

    Call it after a manifest was written: then no checkpoint is in the making.

    Args:
        metric: keep the one that is the best by it, too.
        lowest: see best_checkpoint.
    """
    checkpoints = list_checkpoints(cache.backend)
    final = {checkpoint.key.split("/")[1] for checkpoint in checkpoints[:kept]}
    if metric is not None:
        best = best_checkpoint(cache.backend, checkpoints, metric, lowest=lowest)
        if best is not None:
            log.info("the best checkpoint by %s, %.6g, is %s", metric, best[1], best[0].key)
            final.add(best[0].key.split("/")[1])
    for name in sorted(checkpoint_names(cache) - final):
        remove_checkpoint(cache, name)
        log.info("removed the old checkpoint %s", name)


def _exists(ctx: RunContext, k: int) -> bool:
    return any(
        checkpoint.iteration == k and checkpoint.state == ctx.state.digest
        for checkpoint in list_checkpoints(ctx.backend)
    )
