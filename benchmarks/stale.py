"""A run whose samples are old: `python -m benchmarks.stale CONFIG --stale 4 [--flag value ...]`.

The batch of iteration k is generated with the weights of iteration k - stale. The stages are the
run's own, in another order: segments are generated that far ahead. Such a run cannot be resumed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from slime_core.cluster.session import Session
from slime_core.config.flags import FlagParser, add_flags, overrides_of
from slime_core.config.loading import load_config
from slime_core.doors.command_line import parse
from slime_core.refs import Ref
from slime_core.run.context import RunContext
from slime_core.run.identity import choose_run
from slime_core.run.paths import store_url
from slime_core.run.recover import recover
from slime_core.stages.evaluate import due_evaluation, evaluate
from slime_core.stages.generate import generate
from slime_core.stages.pack import pack
from slime_core.stages.reward import reward
from slime_core.stages.sample import sample
from slime_core.stages.sync import sync
from slime_core.stages.train import train
from slime_core.store.backend import open_backend


async def run(session: Session, stale: int) -> None:
    """Trains all iterations of the session's configuration."""
    ctx = await session.ready()
    await recover(ctx)
    last = ctx.config.run.num_rollout
    await _evaluate(ctx, -1)
    segments = [await _generate(ctx, k) for k in range(min(stale + 1, last))]
    for k in range(last):
        scored = await reward(ctx, segments[k])
        await sync(ctx, await train(ctx, await pack(ctx, scored)))
        ctx.outbox.iteration(k)
        if len(segments) < last:
            segments.append(await _generate(ctx, len(segments)))
        await _evaluate(ctx, k)


async def _generate(ctx: RunContext, segment: int) -> Ref:
    return await generate(ctx, await sample(ctx, segment))


async def _evaluate(ctx: RunContext, k: int) -> None:
    if due_evaluation(ctx, k):
        await evaluate(ctx, k, k + 1)
        ctx.outbox.evaluations(f"evals/{ctx.state.lineage}-{k + 1}/")


async def _main(session: Session, stale: int) -> None:
    reason = "failed"
    try:
        await run(session, stale)
        reason = "finished"
    finally:
        await session.close(reason)


def main() -> None:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--stale", type=int, required=True, help="age of the samples in iterations")
    add_flags(parser)
    options = parse(parser, sys.argv[1:])
    config = load_config(options.config, overrides_of(options))
    backend = open_backend(store_url(config.run.workspace, config.store.store_url))
    choice = choose_run(backend, config, "never")
    asyncio.run(_main(Session.start(config, choice.run_id), options.stale))


if __name__ == "__main__":
    main()
