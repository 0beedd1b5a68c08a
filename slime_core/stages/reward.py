"""Stage 3: what is batch-wide about rewards; so far the check that all of them are there."""

from __future__ import annotations

import asyncio

from slime_core.errors import RewardError
from slime_core.refs import Ref, is_finite
from slime_core.run import faults
from slime_core.run.context import RunContext
from slime_core.stages.rows import kept_rows, raw_rewards
from slime_core.store.seal import Seal


async def reward(ctx: RunContext, seal: Ref) -> Ref:
    """Checks that every kept row has a finite reward and a grader digest; writes nothing.

    Raises:
        RewardError: names the first group without.
    """
    k = seal.iteration
    faults.hold("reward", k)
    with ctx.clock.time(k, "reward"):
        sealed = await asyncio.to_thread(_check, ctx, k)
    return Ref(seal.uri, "scores", k, sealed.rows, sealed.tokens, sealed.digest)


def _check(ctx: RunContext, segment: int) -> Seal:
    seal, rows = kept_rows(ctx, segment)
    for group_id, batch in rows.items():
        if not all(is_finite(value) for value in raw_rewards(ctx, batch)):
            raise RewardError(
                f"group {group_id} of segment {segment} has a reward that is no number"
            )
        if not batch.valid("grader_digest").all():
            raise RewardError(f"group {group_id} of segment {segment} has no grader digest")
    return seal
