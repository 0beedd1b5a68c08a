"""Keeps engines alive while rollout workers use them, and brings weights into them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from slime_core.errors import DeadlineError, EngineError, TrainerError
from slime_core.run.context import RunContext
from slime_core.waits import within
from slime_core.weights.sync.canary import CanaryReading, canary_tokens
from slime_core.weights.sync.machine import SyncOutcome, verify

if TYPE_CHECKING:
    from slime_core.cluster.engine_pool import Engine

log = logging.getLogger(__name__)
WATCH_INTERVAL_S = 0.5
HEARING_S = 10.0
T = TypeVar("T")


async def with_engines(ctx: RunContext, work: Coroutine[Any, Any, T]) -> T:
    """Awaits work that needs engines; one that ends, hangs or fails meanwhile is repaired, brought
    to the served version and given back to the workers. With `offload_train` the trainer sleeps
    meanwhile; a repair wakes it for as long as its weights are needed.

    Raises:
        EngineError: no engine is left; says why.
    """
    ctx.engines.renew_budgets()
    try:
        await _let_sleep(ctx)
    except BaseException:
        work.close()  # nobody awaits it any more
        raise
    task = asyncio.create_task(work)
    health = asyncio.create_task(ctx.engines.watch_health())
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=WATCH_INTERVAL_S)
            if done:
                return task.result()
            await _revive(ctx)
    finally:
        task.cancel()
        health.cancel()
        await asyncio.gather(task, health, return_exceptions=True)


async def _let_sleep(ctx: RunContext) -> None:
    """Frees the trainer's device for the engines. It wakes by itself once it is needed; one that
    has ended is left to the next training, which builds it again."""
    if not ctx.config.cluster.offload_train:
        return
    try:
        await ctx.trainer.status()
    except TrainerError as error:
        log.warning("%s; the next training builds it again", error)
        return
    await ctx.trainer.invoke("sleep")


async def bring_weights(ctx: RunContext) -> SyncOutcome:
    """Brings all engines to the trainer's weights; the gate is closed afterwards.

    Engines that are dead, quarantined or do not take the weights are restarted, within their
    budget. One that is beyond it is left out as long as another one serves.

    Raises:
        EngineError: no engine serves the weights.
    """
    version = ctx.state.version
    ctx.engines.renew_budgets()
    if not ctx.engines.size:
        ctx.served = version
        return SyncOutcome(version, 0.0, ())
    if ctx.config.debug.debug_rollout_only:
        return await _name_own_weights(ctx, version)
    canary = await read_canary(ctx)
    while True:
        await _restart_broken(ctx)
        try:
            outcome = await ctx.weight_sync.run(version, canary, ctx.engines.clients())
            break
        except EngineError as error:
            if not any(ctx.engines.can_restart(engine) for engine in ctx.engines.engines):
                raise
            log.warning("%s; restarting the engines", error)
            for engine in ctx.engines.engines:
                ctx.engines.quarantine(engine.name, "it did not take the weights")
    for name in outcome.serving:
        ctx.engines.admit(name)
    for name, why in outcome.quarantined.items():
        ctx.engines.quarantine(name, why)
    ctx.served = version
    return outcome


async def _name_own_weights(ctx: RunContext, version: str) -> SyncOutcome:
    """Without a trainer engines keep what they have loaded; it gets the version's name."""
    await _restart_broken(ctx)
    serving = []
    for name, client in ctx.engines.clients().items():
        try:
            await client.set_weight_version(version)
        except EngineError as error:
            log.warning("engine %s did not take the name %s: %s", name, version, error)
            ctx.engines.quarantine(name, str(error))
        else:
            ctx.engines.admit(name)
            serving.append(name)
    if not serving:
        raise EngineError("no engine is up, or none took the version's name: see its log")
    ctx.served = version
    return SyncOutcome(version, 0.0, tuple(serving))


async def _restart_broken(ctx: RunContext) -> None:
    for engine in ctx.engines.engines:
        if not engine.process.alive or engine.quarantined is not None:
            await _restarted(ctx, engine)


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
    """Repairs every engine that ended, hangs, was quarantined, or failed a worker's request."""
    down = await _marked_down(ctx)
    for engine in ctx.engines.usable:
        if engine.watch.gone:
            down[engine.client.url] = "it does not answer health checks"
    broken = [engine for engine in ctx.engines.engines if _complaint(engine, down)]
    hopeful = [e for e in broken if ctx.engines.can_restart(e) or e.client.url in down]
    if not hopeful:
        return
    for engine in hopeful:
        ctx.engines.quarantine(engine.name, _complaint(engine, down) or "")
    await ctx.rollout.set_engines(ctx.engines.urls)
    canary = None if ctx.config.debug.debug_rollout_only else await read_canary(ctx)
    for engine in hopeful:
        await _repair(ctx, engine, canary, suspected=engine.client.url in down)
    await _let_sleep(ctx)
    await ctx.rollout.set_engines(ctx.engines.urls)
    if not ctx.engines.usable:
        reasons = "; ".join(f"{e.name}: {e.quarantined}" for e in ctx.engines.engines)
        raise EngineError(f"no engine is left: {reasons}")


async def _marked_down(ctx: RunContext) -> dict[str, str]:
    """Engines that failed a worker's request; none while the worker is too busy to say."""
    try:
        return await ctx.rollout.engines_down()
    except DeadlineError as error:
        log.warning("%s", error)
        return {}


def _complaint(engine: Engine, down: dict[str, str]) -> str | None:
    """Why an engine needs care, None where it does not."""
    if not engine.process.alive:
        return f"its process ended with status {engine.process.returncode}"
    return engine.quarantined or down.get(engine.client.url)


async def _repair(
    ctx: RunContext, engine: Engine, canary: CanaryReading | None, *, suspected: bool
) -> None:
    """Puts an engine back into use.

    Args:
        suspected: it lives and only failed a request, so it may prove itself (once a stage).
            Otherwise it is started anew.
        canary: None where there is no trainer: a new engine keeps the weights it has loaded.
    """
    alive = engine.process.alive
    may_prove = alive and suspected and not engine.pardons
    if may_prove and canary is not None and await _proves_itself(ctx, engine, canary):
        engine.pardons += 1
        ctx.engines.admit(engine.name)
        return
    while await _restarted(ctx, engine):
        try:
            if canary is None:
                await engine.client.set_weight_version(ctx.state.version)
            else:
                await ctx.weight_sync.push(engine.name, engine.client, ctx.state.version, canary)
        except (EngineError, DeadlineError) as error:
            ctx.engines.quarantine(engine.name, str(error))
            continue
        ctx.engines.admit(engine.name)
        return


async def _proves_itself(ctx: RunContext, engine: Engine, canary: CanaryReading) -> bool:
    """Whether a living engine serves the trainer's numbers under the served version."""
    check = verify(engine.client, ctx.state.version, canary, ctx.weight_sync.tolerance)
    try:
        await within(f"{engine.name} to answer the canary", HEARING_S, check)
    except (EngineError, DeadlineError) as error:
        log.warning("%s is not what it should be: %s", engine.name, error)
        return False
    return True


async def _restarted(ctx: RunContext, engine: Engine) -> bool:
    """Starts an engine anew; False if its budget is spent."""
    try:
        await ctx.engines.restart(engine)
    except EngineError as error:
        log.warning("%s", error)
        return False
    return True
