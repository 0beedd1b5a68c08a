"""A training through the session and the stages alone, in a process that a test may kill.

python -m tests.integration.session.driver WORKSPACE NUM_ROLLOUT [JSON OF OVERRIDES]
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from slime_core.cluster.session import Session
from slime_core.config.loading import load_config
from slime_core.config.tree import RunConfig
from slime_core.errors import SlimeError
from slime_core.run.context import RunContext
from slime_core.run.identity import choose_run
from slime_core.run.paths import store_url
from slime_core.run.recover import recover
from slime_core.stages.generate import generate
from slime_core.stages.pack import pack
from slime_core.stages.reward import reward
from slime_core.stages.sample import sample
from slime_core.stages.sync import sync
from slime_core.stages.train import train
from slime_core.store.backend import open_backend

CONFIG = Path(__file__).parents[3] / "configs/quickstart.yaml"
SMALL: dict[str, Any] = {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "eval_interval": None,
    "eval_config": None,
    "store_fsync": False,
    "sglang": {"enable_deterministic_inference": True},
}


def config_of(workspace: str, num_rollout: int, **overrides: Any) -> RunConfig:
    given = {**SMALL, "workspace": workspace, "num_rollout": num_rollout, **overrides}
    return load_config(CONFIG, given)


async def iteration(ctx: RunContext, k: int) -> None:
    scored = await reward(ctx, await generate(ctx, await sample(ctx, k)))
    await sync(ctx, await train(ctx, await pack(ctx, scored)))


async def training(session: Session) -> None:
    reason = "failed"
    try:
        ctx = await session.ready()
        recovery = await recover(ctx)
        print(json.dumps(dict(recovery.table)), flush=True)
        for k in range(recovery.next_iteration, session.config.run.num_rollout):
            await iteration(ctx, k)
            ctx.outbox.iteration(k)
        reason = "finished"
    finally:
        await session.close(reason)


def main(workspace: str, num_rollout: str, overrides: str = "{}") -> int:
    config = config_of(workspace, int(num_rollout), **json.loads(overrides))
    choice = choose_run(open_backend(store_url(workspace, None)), config)
    print(json.dumps({"run": choice.run_id, "sentence": choice.sentence}), flush=True)
    try:
        asyncio.run(training(Session.start(config, choice.run_id)))
    except SlimeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
