"""Recovery: whatever happened before, bring trainer, engines and the open segment to one state."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from slime_core.run.checkpoints import save_if_due
from slime_core.run.context import RunContext
from slime_core.run.history import read_history
from slime_core.run.plan import Action, History, Plan, next_untrained, plan
from slime_core.run.restore import Restored, restore_trainer
from slime_core.stages.engine_care import bring_weights, open_gate
from slime_core.store.ledger import put_sync
from slime_core.words import counted

log = logging.getLogger(__name__)
WORDS = {
    Action.OPEN: "begins",
    Action.ADOPT: "goes on with generating",
    Action.PACK: "goes on with packing, its samples are complete",
    Action.TRAIN: "goes on with training, its batch is there",
}


@dataclass(frozen=True)
class Recovery:
    """What recovery found and did.

    Attributes:
        next_iteration: the first iteration to run.
        resumed: the run had been started before.
        table: (what, value) lines for a person.
    """

    next_iteration: int
    resumed: bool = False
    table: list[tuple[str, str]] = field(default_factory=list)


async def recover(ctx: RunContext) -> Recovery:
    """Reads the store, restores the trainer, pushes the weights and opens the gate.

    Raises:
        DigestError: something that later things rest on is missing or damaged; names it.
        TrainerError: the trainer cannot be restored.
        EngineError: no engine takes the weights.
    """
    if ctx.config.debug.debug_rollout_only:
        return await _without_trainer(ctx)
    await ctx.trainer.fence(ctx.lease.epoch)
    await ctx.rollout.fence(ctx.lease.epoch)
    history = await asyncio.to_thread(read_history, ctx.cache, ctx.start_state)
    steps = plan(history, ctx.config.run.num_rollout)
    restored = await restore_trainer(ctx, steps.last)
    outcome = await bring_weights(ctx)
    ctx.canary = outcome.canary
    if steps.publish:
        by = {**ctx.by(steps.last), "canary": outcome.canary, "engines": len(outcome.serving)}
        await asyncio.to_thread(put_sync, ctx.backend, steps.last, ctx.state.version, by)
    await open_gate(ctx)
    if steps.last >= 0:
        await save_if_due(ctx, steps.last)  # the process before may have ended just before that
    await asyncio.to_thread(ctx.outbox.catch_up)
    recovery = Recovery(steps.iteration, bool(history.draws), _table(history, steps, restored))
    if recovery.resumed:
        for name, value in recovery.table:
            log.info("recovery: %s: %s", name, value)
    return recovery


async def _without_trainer(ctx: RunContext) -> Recovery:
    """Recovery of a run that only generates: nothing is restored, engines keep their weights."""
    await ctx.rollout.fence(ctx.lease.epoch)
    history = await asyncio.to_thread(read_history, ctx.cache, ctx.start_state)
    k = next_untrained(history)
    await bring_weights(ctx)
    await open_gate(ctx)
    await asyncio.to_thread(ctx.outbox.catch_up)
    table = [("done before", counted(k, "iteration")), ("trainer", "none (--debug-rollout-only)")]
    return Recovery(k, bool(history.draws), table)


def _table(history: History, steps: Plan, restored: Restored) -> list[tuple[str, str]]:
    """What a person is told: in words of the documentation, and only what there is to tell."""
    if restored.checkpoint < 0:
        trainer = "the initial weights"
    else:
        trainer = f"the checkpoint after iteration {restored.checkpoint}"
    if restored.replayed:
        trainer += f", and {counted(restored.replayed, 'iteration')} trained again from the store"
    table = [("done before", counted(steps.iteration, "iteration")), ("trainer", trainer)]
    if steps.action is Action.FINISHED:
        table.append(("next", "nothing to train"))
    else:
        table.append(("next", f"iteration {steps.iteration}: {WORDS[steps.action]}"))
    if restored.changed and steps.action is not Action.FINISHED:
        text = f"from iteration {steps.last + 1} on: {', '.join(restored.changed)}"
        table.append(("changed", text))
    segment = history.unsealed.get(steps.iteration)
    if steps.action is Action.ADOPT:
        kept, left = len(segment.finished) if segment else 0, len(steps.to_generate)
        table.append(("samples", f"{counted(kept, 'finished group')} kept, {left} to be generated"))
    damaged = sum(len(segment.quarantined) for segment in history.unsealed.values())
    if damaged or restored.damaged:
        checkpoints = counted(len(restored.damaged), "checkpoint")
        text = f"{counted(damaged, 'file')} of samples, {checkpoints} (set aside)"
        table.append(("damaged", text))
    if restored.drift:
        text = f"trained again, iteration {restored.drift[0]} gave other weights than before"
        text += restored.hint
        table.append(("note", text))
    return table
