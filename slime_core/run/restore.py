"""Brings the trainer to the state after an iteration: newest good checkpoint, then replay."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

from slime_core.config.fields import numeric_changes, numeric_digest, values
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError, DigestError, TrainerError
from slime_core.run.context import FIRST_LINEAGE, RunContext
from slime_core.run.drift import hooks_hint
from slime_core.run.identity import recorded_config
from slime_core.run.training import train_call
from slime_core.store.checkpoints import Checkpoint, fetch_checkpoint, list_checkpoints
from slime_core.store.ledger import Ledger, unbroken_chain

log = logging.getLogger(__name__)


@dataclass
class Restored:
    """How the trainer came to its state.

    Attributes:
        checkpoint: iteration of the loaded checkpoint, -1 for the initial weights.
        replayed: iterations trained again.
        drift: iterations whose replay gave other weights than the ledger says.
        hint: what functions of the user's may have to do with the first of them.
        damaged: checkpoints that could not be used, each with its reason.
        changed: numeric values that are others than those of the last iteration.
    """

    checkpoint: int = -1
    replayed: int = 0
    drift: list[int] = field(default_factory=list)
    hint: str = ""
    damaged: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


async def restore_trainer(ctx: RunContext, last: int, *, rebuild: bool = False) -> Restored:
    """Brings the ranks to S_last.

    Args:
        last: iteration to restore, -1 for the initial weights.
        rebuild: end the ranks first; needed unless they are fresh.

    Raises:
        DigestError: the ledger chain does not reach `last`.
        TrainerError: the ranks cannot be built or a replay fails.
    """
    if rebuild:
        await ctx.trainer.rebuild()
        await ctx.trainer.fence(ctx.lease.epoch)
    chain = (await asyncio.to_thread(unbroken_chain, ctx.backend, ctx.start_state))[: last + 1]
    if len(chain) != last + 1:
        raise DigestError(f"the ledger chain ends at {len(chain) - 1}, before iteration {last}")
    states = [ctx.start_state, *(ledger.state for ledger in chain)]
    found = Restored()
    loaded = await _load(ctx, states, last, found)
    ctx.state.lineage = _lineage_of(chain)
    ctx.state.trained_s = 0.0
    ranks = _Ranks(ctx)
    for ledger in chain[loaded + 1 :]:
        await ranks.take(ledger.numeric_digest)
        await _replay(ctx, ledger, found)
    await ranks.take(ranks.own)
    if chain:
        found.changed = await asyncio.to_thread(_changed_since, ctx, chain[-1])
    if found.drift:
        ctx.state.drifts += 1
        ctx.state.lineage = drifted_lineage(ctx.lease.epoch, ctx.state.drifts)
        log.warning(
            "replay gave other weights than before from iteration %d on: versions now begin "
            "with %s%s%s",
            found.drift[0], ctx.state.lineage, _numeric_hint(ctx, chain[found.drift[0]]),
            found.hint,
        )  # fmt: skip
    ctx.state.digest, ctx.state.iterations = states[-1], last + 1
    return found


class _Ranks:
    """The ranks during a replay: an iteration is trained again with the numeric values (such as
    lr) of its time, and what comes after the replay with the present ones."""

    def __init__(self, ctx: RunContext) -> None:
        self.own = numeric_digest(ctx.config)
        self._ctx = ctx
        self._built = self.own

    async def take(self, numeric: str) -> None:
        """Goes on with the values of this digest, in new ranks with the same weights and
        optimizer state where the present ones have others."""
        if numeric == self._built:
            return
        try:
            config = None if numeric == self.own else self._recorded(numeric)
        except ConfigError as error:
            log.warning("an iteration is trained again with other numeric values: %s", error)
            return
        ctx = self._ctx
        with tempfile.TemporaryDirectory(dir=ctx.paths.local, prefix="between-") as scratch:
            folder = str(Path(scratch) / "weights")
            await ctx.trainer.invoke("save", folder)
            await ctx.trainer.rebuild(config)
            await ctx.trainer.fence(ctx.lease.epoch)
            await ctx.trainer.invoke("load", folder)
        self._built = numeric

    def _recorded(self, numeric: str) -> RunConfig:
        ctx = self._ctx
        present = values(ctx.config, "operational")
        del present["sglang"]
        return recorded_config(ctx.backend, numeric, present)


async def _load(ctx: RunContext, states: list[str], last: int, found: Restored) -> int:
    """Loads the newest good checkpoint on the chain; returns its iteration, -1 for none."""
    for checkpoint in await asyncio.to_thread(list_checkpoints, ctx.backend):
        if checkpoint.iteration > last or states[checkpoint.iteration + 1] != checkpoint.state:
            continue
        if await _try_load(ctx, checkpoint, found):
            found.checkpoint = checkpoint.iteration
            return checkpoint.iteration
    await ctx.trainer.invoke("set_state", states[0])
    return -1


async def _try_load(ctx: RunContext, checkpoint: Checkpoint, found: Restored) -> bool:
    try:
        folder = await asyncio.to_thread(fetch_checkpoint, ctx.cache, checkpoint)
        loaded = await ctx.trainer.invoke("load", str(folder))
    except (DigestError, TrainerError) as error:
        log.warning("checkpoint %s is not used: %s", checkpoint.key, error)
        found.damaged.append(f"{checkpoint.key}: {error}")
        if isinstance(error, TrainerError):
            await ctx.trainer.rebuild()
            await ctx.trainer.fence(ctx.lease.epoch)
        return False
    if loaded["state"] != checkpoint.state:
        found.damaged.append(f"{checkpoint.key}: holds another state than its manifest says")
        await ctx.trainer.rebuild()
        await ctx.trainer.fence(ctx.lease.epoch)
        return False
    return True


async def _replay(ctx: RunContext, ledger: Ledger, found: Restored) -> None:
    """Trains an iteration again: no ledger, the same skips, and its weights compared."""
    call = train_call(
        ctx, ledger.iteration, ledger.batch_digest, ledger.parent, ledger.state,
        ledger.forced_skips,
    )  # fmt: skip
    start = monotonic()
    result = await ctx.trainer.train(call)
    ctx.state.trained_s += monotonic() - start  # it would have to be repeated again
    found.replayed += 1
    ours = [step["weights_digest"] for step in result["steps"]]
    if ours != [step["weights_digest"] for step in ledger.result["steps"]]:
        found.hint = found.hint if found.drift else hooks_hint(ledger.result, result)
        found.drift.append(ledger.iteration)


def _lineage_of(chain: list[Ledger]) -> str:
    return chain[-1].weight_version.rsplit("-", 1)[0] if chain else FIRST_LINEAGE


def drifted_lineage(epoch: int, drifts: int) -> str:
    """Names the weights after a drift so that no version ever names two of them.

    Args:
        epoch: the owner's; nobody else has it.
        drifts: how many that owner has seen, this one included.
    """
    return f"l{epoch}.{drifts}"


def _changed_since(ctx: RunContext, ledger: Ledger) -> list[str]:
    """Numeric values that are no longer those of an iteration."""
    if ledger.numeric_digest == numeric_digest(ctx.config):
        return []
    try:
        recorded = recorded_config(ctx.backend, ledger.numeric_digest, {})
    except ConfigError as error:
        return [f"what, cannot be told: {error}"]
    return numeric_changes(recorded, ctx.config)


def _numeric_hint(ctx: RunContext, ledger: Ledger) -> str:
    if ledger.numeric_digest == numeric_digest(ctx.config):
        return ""
    return " (numeric values of the configuration have changed since, such as lr or num_rollout)"
