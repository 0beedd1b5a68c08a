"""Keeps engines alive while rollout workers use them, and brings weights into them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from slime_core.errors import EngineError
from slime_core.run.context import RunContext
from slime_core.weights.sync.canary import CanaryReading, canary_tokens
from slime_core.weights.sync.machine import SyncOutcome

log = logging.getLogger(__name__)
WATCH_INTERVAL_S = 0.5
T = TypeVar("T")


async def with_engines(ctx: RunContext, work: Coroutine[Any, Any, T]) -> T:
    """Awaits work that needs engines; an engine that dies meanwhile is restarted, brought to the
    served version and given back to the workers.

    Raises:
        EngineError: an engine's restart budget is spent.
    """
    task = asyncio.create_task(work)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=WATCH_INTERVAL_S)
            if done:
                return task.result()
            await _revive(ctx)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def bring_weights(ctx: RunContext) -> SyncOutcome:
    """Brings all engines to the trainer's weights and opens the gate to those that took them.

    Engines that are dead or do not take the weights are restarted, within their budget.

    Raises:
        EngineError: no engine serves the weights.
    """
    version = ctx.state.version
    canary = await read_canary(ctx)
    while True:
        for engine in ctx.engines.dead():
            await ctx.engines.restart(engine)
        try:
            outcome = await ctx.weight_sync.run(version, canary, ctx.engines.clients())
            break
        except EngineError as error:
            log.warning("%s; restarting the engines", error)
            for engine in list(ctx.engines.engines):
                await ctx.engines.restart(engine)
    for name in outcome.serving:
        ctx.engines.admit(name)
    for name, why in outcome.quarantined.items():
        ctx.engines.quarantine(name, why)
    ctx.served = version
    return outcome


async def open_gate(ctx: RunContext) -> None:
    """Lets requests leave again; called once the served version is recorded."""
    await ctx.rollout.set_engines(ctx.engines.urls)
    await ctx.weight_sync.resume()


async def read_canary(ctx: RunContext) -> CanaryReading:
    """The trainer's log-probs of the canary tokens under its present weights."""
    tokens = canary_tokens(ctx.model["vocab_size"], ctx.model["max_positions"])
    log_probs = await ctx.trainer.invoke("canary", list(tokens))
    return CanaryReading(tokens, tuple(log_probs))


async def _revive(ctx: RunContext) -> None:
    dead = ctx.engines.dead()
    if not dead:
        return
    for engine in dead:
        log.warning("%s ended; restarting it", engine.name)
        await ctx.engines.restart(engine)
    canary = await read_canary(ctx)
    for engine in dead:
        await ctx.weight_sync.push(engine.name, engine.client, ctx.state.version, canary)
        ctx.engines.admit(engine.name)
    await ctx.rollout.set_engines(ctx.engines.urls)
