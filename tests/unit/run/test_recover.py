"""Recovery: one path from whatever the store holds to a trainer, engines and an open gate."""

import asyncio
from pathlib import Path

import pytest

from slime_core.errors import DigestError, EngineError
from slime_core.run.context import RunContext
from slime_core.run.recover import recover
from slime_core.stages.sync import sync
from slime_core.stages.train import train
from slime_core.store import layout
from slime_core.store.checkpoints import list_checkpoints
from slime_core.store.documents import read_document
from slime_core.store.draws import log_draws
from tests.unit.stages.standins import GROUPS, Lab, end, packed
from tests.unit.store.builders import draw, group_rows, write_groups


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def lived(lab: Lab, iterations: int) -> RunContext:
    """A process that ran so many iterations, synced after each."""
    ctx = lab.start()

    async def body() -> None:
        await recover(ctx)
        for k in range(iterations):
            await sync(ctx, await train(ctx, packed(ctx, k)))

    asyncio.run(body())
    end(ctx)
    return ctx


def recovered(lab: Lab):
    ctx = lab.start()
    return ctx, asyncio.run(recover(ctx))


def test_a_new_run_publishes_its_initial_weights_and_opens_the_gate(lab):
    ctx, recovery = recovered(lab)
    assert (recovery.next_iteration, recovery.resumed) == (0, False)
    assert ctx.rollout.is_open and ctx.rollout.urls == ["http://engine-0/0"]
    assert ctx.served == "l0-0" and ctx.engines.engines[0].client.version == "l0-0"
    assert ctx.rollout.epoch == ctx.trainer.epoch == ctx.lease.epoch
    assert ctx.backend.list(layout.ITERATIONS) == [], "nothing was trained, nothing is recorded"


def test_a_run_goes_on_where_its_ledgers_end(lab):
    before = lived(lab, 3)
    ctx, recovery = recovered(lab)
    assert (recovery.next_iteration, recovery.resumed) == (3, True)
    assert ctx.trainer.weights == before.trainer.weights
    assert ctx.state.digest == before.state.digest
    assert ctx.served == "l0-3" and ctx.engines.engines[0].client.weights == ctx.trainer.weights
    table = dict(recovery.table)
    assert table == {
        "done before": "3 iterations",
        "trainer": "the initial weights, and 3 iterations trained again from the store",
        "next": "iteration 3: begins",
    }


def test_weights_that_were_trained_but_never_published_are_published_now(lab):
    ctx = lab.start()

    async def killed_before_sync() -> None:
        await recover(ctx)
        await train(ctx, packed(ctx, 0))

    asyncio.run(killed_before_sync())
    end(ctx)
    following, _ = recovered(lab)
    document = read_document(lab.backend, layout.sync(0))
    assert document.body == {"iteration": 0, "version": "l0-1"}
    assert document.by["engines"] == 1 and following.served == "l0-1"


def test_an_open_segment_is_reported_with_what_is_left_to_do(lab):
    ctx = lived(lab, 1)
    log_draws(lab.backend, 1, [draw(GROUPS + i, 1) for i in range(3)])
    write_groups(lab.backend, 1, [group_rows(GROUPS)], ctx.lease.epoch)
    _, recovery = recovered(lab)
    table = dict(recovery.table)
    assert recovery.next_iteration == 1
    assert table["samples"] == "1 finished group kept, 2 to be generated"
    assert table["next"] == "iteration 1: goes on with generating"


def test_a_checkpoint_that_the_killed_process_owed_is_written(tmp_path):
    lab = Lab(tmp_path, save_interval=2)
    ctx = lived(lab, 1)

    async def killed_before_save() -> None:
        lasting = lab.start()
        await recover(lasting)
        lasting.trainer.before = lambda call: None  # type: ignore[attr-defined]
        batch = packed(lasting, 1)
        plain = lasting.trainer.invoke

        async def invoke(method: str, *args: str) -> object:
            if method == "save":
                raise KeyboardInterrupt
            return await plain(method, *args)

        lasting.trainer.invoke = invoke  # type: ignore[method-assign]
        await train(lasting, batch)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(killed_before_save())
    assert list_checkpoints(lab.backend) == []
    ctx, _ = recovered(lab)
    (checkpoint,) = list_checkpoints(lab.backend)
    assert checkpoint.iteration == 1 and checkpoint.state == ctx.state.digest


def test_a_gap_stops_with_the_files_name_before_anything_is_served(lab):
    lived(lab, 3)
    lab.backend.delete(layout.ledger(0))
    ctx = lab.start()
    with pytest.raises(DigestError, match=r"iterations/000000/ledger\.json is missing"):
        asyncio.run(recover(ctx))
    assert not ctx.rollout.is_open and ctx.served is None


def test_a_damaged_draws_file_is_named(lab):
    lived(lab, 1)
    path = lab.backend.local_path(layout.draws(0))
    assert path is not None
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    ctx = lab.start()
    with pytest.raises(DigestError, match=r"draws/000000\.arrow is damaged"):
        asyncio.run(recover(ctx))


def test_no_engine_means_no_open_gate(lab):
    ctx = lab.start()
    for engine in ctx.engines.engines:
        engine.process.terminate()
    spawn = ctx.engines.spawn

    def broken(index: int):
        process, client = spawn(index)
        process.starts = False  # type: ignore[attr-defined]
        return process, client

    ctx.engines.spawn = broken
    with pytest.raises(EngineError, match="no engine is up"):
        asyncio.run(recover(ctx))
    assert not ctx.rollout.is_open
