"""One iteration on real processes whose engine, trainer and rollout worker are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from slime_core.cluster.session import Session
from slime_core.errors import EngineError
from slime_core.rollout.settings import EvalJob
from slime_core.run.audit import audit
from slime_core.run.context import RunContext
from slime_core.run.recover import recover
from slime_core.stages.generate import generate
from slime_core.stages.pack import pack
from slime_core.stages.reward import reward
from slime_core.stages.sample import sample
from slime_core.stages.sync import sync
from slime_core.stages.train import train
from slime_core.store.documents import read_document
from slime_core.weights.sync.canary import TOLERANCE_FP32
from tests.integration.session.driver import config_of, iteration


def kill_actor(name: str) -> None:
    for child in psutil.Process().children(recursive=True):
        if name in " ".join(child.cmdline()):
            child.kill()
            return
    raise AssertionError(f"no {name} is running")


async def iteration_under_fire(ctx: RunContext) -> None:
    draws = await sample(ctx, 1)
    kill_actor("RolloutActor")
    engine = ctx.engines.engines[0]
    os.kill(engine.process.pid or 0, signal.SIGKILL)
    seal = await generate(ctx, draws)
    assert engine.restarts == 1 and engine.process.alive
    scored = await reward(ctx, seal)
    batch = await pack(ctx, scored)
    kill_actor("TrainerActor")
    ledger = await train(ctx, batch)
    await sync(ctx, ledger)


@pytest.mark.slow  # 30 s of starts and repairs
def test_an_iteration_survives_the_death_of_each_of_its_processes(tmp_path: Path):
    held_out = {"datasets": [{"name": "a", "path": "configs/quickstart/heldout.jsonl@[0:4]"}]}
    config = config_of(str(tmp_path), 3, eval_interval=9, eval_config=held_out)
    session = Session.start(config, "r")

    async def body() -> None:
        reason = "failed"
        try:
            ctx = await session.ready()
            await recover(ctx)
            await iteration(ctx, 0)
            await iteration_under_fire(ctx)
            kill_actor("RolloutActor")  # between two stages: the next sync or draw finds it
            await iteration(ctx, 2)
            # What an actor raises keeps its type and sentence on the way here.
            with pytest.raises(EngineError, match=r"of l0-9 was answered by \['l0-3'\]"):
                await ctx.rollout.evaluate(ctx.lease.epoch, EvalJob(9, "l0-9", "a"))
            reason = "finished"
        finally:
            await session.close(reason)

    asyncio.run(body())
    log = (session.paths.logs / "driver.log").read_text()
    assert log.count("the rollout worker died; starting it anew (1 of 3 in this stage)") == 2
    for k in range(3):
        document = read_document(session.backend, f"iterations/{k:06d}/sync.json")
        assert document.body["version"] == f"l0-{k + 1}", "the replay gave the same weights"
        assert document.by["canary"] < TOLERANCE_FP32 and document.by["engines"] == 1
    found = audit(tmp_path / "store" / "r")
    assert found.sound and (found.iterations, found.trained) == (3, 12), found.problems
