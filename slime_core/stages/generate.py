"""Stage 2: generate, score and store the groups of the segment, and seal it."""

from __future__ import annotations

from slime_core.refs import Ref
from slime_core.run import faults
from slime_core.run.context import RunContext
from slime_core.stages.engine_care import with_engines


async def generate(ctx: RunContext, draws: Ref) -> Ref:
    """Returns the seal of the segment."""
    k = draws.iteration
    faults.hold("generate", k)
    with ctx.clock.time(k, "generate"):
        return await with_engines(ctx, ctx.rollout.generate(ctx.lease.epoch, k))
