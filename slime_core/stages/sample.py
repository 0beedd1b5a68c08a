"""Stage 1: open the segment and log its draws, before any request leaves."""

from __future__ import annotations

from slime_core.refs import Ref
from slime_core.run import faults
from slime_core.run.context import RunContext


async def sample(ctx: RunContext, k: int) -> Ref:
    """Returns the draws of segment k."""
    faults.hold("sample", k)
    with ctx.clock.time(k, "sample"):
        return await ctx.rollout.sample(ctx.lease.epoch, k)
