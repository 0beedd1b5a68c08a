"""Stage 6: publish the new weights to the engines."""

from __future__ import annotations

import asyncio

from slime_core.refs import Ref
from slime_core.run import faults
from slime_core.run.context import RunContext
from slime_core.stages.engine_care import bring_weights, open_gate
from slime_core.store import layout
from slime_core.store.ledger import put_sync


async def sync(ctx: RunContext, ledger: Ref) -> Ref:
    """Brings all engines to the weights after the iteration and records that they serve.

    Raises:
        EngineError: no engine took the weights within its restart budget.
    """
    k = ledger.iteration
    faults.hold("sync", k)
    with ctx.clock.time(k, "sync"):
        if ctx.served != ctx.state.version:
            outcome = await bring_weights(ctx)
            ctx.canary = outcome.canary
    by = {**ctx.by(k), "canary": ctx.canary, "engines": len(ctx.engines.usable)}
    document = await asyncio.to_thread(put_sync, ctx.backend, k, ctx.state.version, by)
    await open_gate(ctx)
    return Ref(layout.sync(k), "sync", k, digest=document.digest, from_store=document.found)
