"""How an iteration's training is asked for, the first time and in a replay."""

from __future__ import annotations

from slime_core.cluster.train_call import TrainCall
from slime_core.run.context import RunContext
from slime_core.seeds import derive_seed


def train_call(
    ctx: RunContext,
    iteration: int,
    batch_digest: str,
    expect: str,
    next_state: str,
    forced_skips: tuple[bool, ...] | None = None,
) -> TrainCall:
    """One iteration from state `expect` to `next_state`."""
    return TrainCall(
        iteration=iteration,
        epoch=ctx.lease.epoch,
        expect=expect,
        next_state=next_state,
        batch_digest=batch_digest,
        seed=derive_seed(ctx.config.run.seed, "train", iteration),
        forced_skips=forced_skips,
    )
