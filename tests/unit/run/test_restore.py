"""The trainer comes back to the state that the ledger names, from whatever is left to load."""

import asyncio
from pathlib import Path

import pytest

from slime_core.errors import DigestError, TrainerError
from slime_core.run.context import RunContext
from slime_core.run.identity import record_config
from slime_core.run.restore import restore_trainer
from slime_core.stages.train import train
from slime_core.store import layout
from slime_core.store.checkpoints import list_checkpoints
from slime_core.store.ledger import read_ledger
from tests.unit.stages.standins import INITIAL, Lab, StandInTrainer, end, packed


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


async def trained(ctx: RunContext, iterations: range) -> None:
    await ctx.trainer.invoke("set_state", ctx.start_state)
    ctx.state.digest = ctx.start_state
    for k in iterations:
        await train(ctx, packed(ctx, k))


def history(lab: Lab, iterations: int = 4) -> tuple[str, str]:
    """A process that trained and ended; (weights, state) at its end."""
    ctx = lab.start()
    asyncio.run(trained(ctx, range(iterations)))
    end(ctx)
    return ctx.trainer.weights, ctx.state.digest  # type: ignore[attr-defined]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_without_a_checkpoint_everything_is_replayed_from_the_initial_weights(lab):
    weights, state = history(lab)
    ctx = lab.start()
    found = asyncio.run(restore_trainer(ctx, 3))
    assert (found.checkpoint, found.replayed, found.drift) == (-1, 4, [])
    assert ctx.trainer.weights == weights and ctx.state.digest == state
    assert ctx.trainer.log == [
        "set_state", "replay 0", "replay 1", "replay 2", "replay 3",
    ]  # fmt: skip
    assert ctx.state.version == "l0-4"


def test_before_the_first_iteration_there_is_nothing_to_replay(lab):
    ctx = lab.start()
    found = asyncio.run(restore_trainer(ctx, -1))
    assert found.replayed == 0 and ctx.trainer.weights == INITIAL
    assert (ctx.state.digest, ctx.state.version) == (ctx.start_state, "l0-0")


def test_the_newest_checkpoint_is_loaded_and_the_rest_replayed(tmp_path):
    lab = Lab(tmp_path, save_interval=2)
    weights, _ = history(lab, iterations=5)
    ctx = lab.start()
    found = asyncio.run(restore_trainer(ctx, 4))
    assert (found.checkpoint, found.replayed) == (3, 1)
    assert ctx.trainer.weights == weights


@pytest.mark.parametrize("damage", ["file", "manifest", "missing file"])
def test_a_damaged_checkpoint_leaves_the_one_before(tmp_path, damage):
    lab = Lab(tmp_path, save_interval=2)
    weights, _ = history(lab, iterations=5)
    newest = list_checkpoints(lab.backend)[0]
    folder = lab.backend.local_path(newest.key.rstrip("/"))
    assert newest.iteration == 3 and folder is not None
    if damage == "missing file":
        (folder / "rank").unlink()
    else:
        flip(folder / ("rank" if damage == "file" else "manifest.json"))
    ctx = lab.start()
    found = asyncio.run(restore_trainer(ctx, 4))
    assert (found.checkpoint, found.replayed) == (1, 3)
    assert ctx.trainer.weights == weights
    assert len(found.damaged) == (damage != "manifest")


def test_all_checkpoints_damaged_is_a_replay_from_the_start(tmp_path):
    lab = Lab(tmp_path, save_interval=2)
    weights, _ = history(lab, iterations=4)
    for checkpoint in list_checkpoints(lab.backend):
        flip(lab.backend.local_path(checkpoint.key + "rank"))  # type: ignore[arg-type]
    ctx = lab.start()
    found = asyncio.run(restore_trainer(ctx, 3))
    assert (found.checkpoint, found.replayed, len(found.damaged)) == (-1, 4, 2)
    assert ctx.trainer.weights == weights


def test_a_checkpoint_that_cannot_be_loaded_costs_a_rebuild_and_not_the_run(tmp_path, monkeypatch):
    lab = Lab(tmp_path, save_interval=2)
    weights, _ = history(lab, iterations=4)
    ctx = lab.start()
    plain = ctx.trainer.invoke

    async def invoke(method: str, *args: str) -> object:
        if method == "load" and "000003-" in args[0]:
            ctx.trainer.weights = "half loaded"  # type: ignore[attr-defined]
            raise TrainerError("it does not fit")
        return await plain(method, *args)

    monkeypatch.setattr(ctx.trainer, "invoke", invoke)
    found = asyncio.run(restore_trainer(ctx, 3))
    assert (found.checkpoint, found.replayed) == (1, 2) and ctx.trainer.weights == weights
    assert ctx.trainer.log[:2] == ["rebuild", f"fence {ctx.lease.epoch}"]


def test_a_checkpoint_with_another_state_than_its_manifest_is_not_used(tmp_path):
    lab = Lab(tmp_path, save_interval=2)
    weights, _ = history(lab, iterations=2)
    ctx = lab.start()

    async def invoke(method: str, *args: str) -> object:
        if method == "load":
            ctx.trainer.weights = "of another run"  # type: ignore[attr-defined]
            return {"state": "foreign"}
        return await type(ctx.trainer).invoke(ctx.trainer, method, *args)

    ctx.trainer.invoke = invoke  # type: ignore[method-assign]
    found = asyncio.run(restore_trainer(ctx, 1))
    assert found.checkpoint == -1 and ctx.trainer.weights == weights
    assert "holds another state than its manifest says" in found.damaged[0]


def test_a_checkpoint_beyond_or_beside_the_chain_is_left_alone(tmp_path):
    lab = Lab(tmp_path, save_interval=1)
    history(lab, iterations=3)
    ctx = lab.start()
    found = asyncio.run(restore_trainer(ctx, 1))  # the trainer fails in iteration 2
    assert found.checkpoint == 1 and ctx.state.version == "l0-2"


def test_skipped_steps_are_skipped_again(lab):
    ctx = lab.start()
    ctx.trainer.skips = {1}  # type: ignore[attr-defined]
    asyncio.run(trained(ctx, range(3)))
    weights = ctx.trainer.weights  # type: ignore[attr-defined]
    end(ctx)
    again = lab.start()
    assert asyncio.run(restore_trainer(again, 2)).drift == []
    assert again.trainer.weights == weights


def test_a_drift_is_recorded_and_its_weights_get_a_name_of_their_own(lab, caplog):
    history(lab, 3)
    ctx = lab.start()
    ctx.trainer.drifts = {1}  # type: ignore[attr-defined]
    found = asyncio.run(restore_trainer(ctx, 2))
    assert found.drift == [1, 2], "what follows differs, too"
    assert ctx.state.version == f"l{ctx.lease.epoch}.1-3"
    assert "from iteration 1 on" in caplog.text


def test_two_drifts_never_share_a_version(lab):
    """In one process, and in the next that knows of no drift because no ledger followed it."""
    history(lab, 2)
    versions = []
    for _ in range(2):
        ctx = lab.start()
        for _ in range(2):
            ctx.trainer.drifts = {1}  # type: ignore[attr-defined]
            asyncio.run(restore_trainer(ctx, 1, rebuild=True))
            versions.append(ctx.state.version)
        end(ctx)
    assert len(set(versions)) == 4 and "l0-2" not in versions


def test_the_lineage_goes_on_from_the_last_ledger(tmp_path):
    lab = Lab(tmp_path, save_interval=3)
    history(lab, 2)
    ctx = lab.start()
    ctx.trainer.drifts = {0}  # type: ignore[attr-defined]
    asyncio.run(restore_trainer(ctx, 1))
    asyncio.run(train(ctx, packed(ctx, 2)))
    lineage = f"l{ctx.lease.epoch}.1"
    drifted = read_ledger(lab.backend, 2)
    assert drifted is not None and drifted.weight_version == f"{lineage}-3"
    end(ctx)
    following = lab.start()
    assert asyncio.run(restore_trainer(following, 2)).drift == []
    assert following.state.version == f"{lineage}-3"


def test_other_numeric_values_are_named_where_a_replay_drifts(tmp_path, caplog):
    history(Lab(tmp_path), 2)
    ctx = Lab(tmp_path, lr=0.5).start()
    ctx.trainer.drifts = {0}  # type: ignore[attr-defined]
    asyncio.run(restore_trainer(ctx, 1))
    assert "numeric values of the configuration have changed since" in caplog.text


@pytest.mark.parametrize(
    ("then", "now", "says"),
    [
        ({"hooks": {"f x.py:f": "1"}}, {"hooks": {"f x.py:f": "2"}}, "(edited since: f x.py:f)"),
        ({"postprocessed": "1"}, {"postprocessed": "2"}, "changed other data than then"),
        ({"hooks": {"f x.py:f": "1"}, "postprocessed": "1"},) * 2 + ("",),
    ],
)
def test_a_drift_names_the_users_functions_that_differ(lab, monkeypatch, caplog, then, now, says):
    plain = StandInTrainer.train

    def gives(more):
        async def train(self, call):
            return await plain(self, call) | more

        monkeypatch.setattr(StandInTrainer, "train", train)

    gives(then)
    history(lab, 2)
    gives(now)
    ctx = lab.start()
    ctx.trainer.drifts = {0}  # type: ignore[attr-defined]
    found = asyncio.run(restore_trainer(ctx, 1))
    assert found.drift == [0, 1] and says in found.hint and bool(says) == bool(found.hint)
    assert f"versions now begin with {ctx.state.lineage}{found.hint}" in caplog.text


def test_each_iteration_is_replayed_with_the_learning_rate_of_its_time(tmp_path):
    """A run at 1e-3 for two iterations and at 5e-4 for two more, killed without a checkpoint."""
    first = Lab(tmp_path, lr=1e-3).start()
    record_config(first.backend, first.config)
    asyncio.run(trained(first, range(2)))
    end(first)
    slower = Lab(tmp_path, lr=5e-4).start()
    record_config(slower.backend, slower.config)
    assert asyncio.run(restore_trainer(slower, 1)).drift == []
    assert slower.trainer.lr == 5e-4, "what follows is trained with the present value"  # type: ignore[attr-defined]
    for k in (2, 3):
        asyncio.run(train(slower, packed(slower, k)))
    end(slower)

    last = Lab(tmp_path, lr=2e-4).start()
    record_config(last.backend, last.config)
    found = asyncio.run(restore_trainer(last, 3))
    assert (found.replayed, found.drift) == (4, [])
    assert last.trainer.weights == slower.trainer.weights  # type: ignore[attr-defined]
    assert last.trainer.lr == 2e-4 and last.state.version == "l0-4"  # type: ignore[attr-defined]
    assert [*last.paths.local.glob("between-*")] == []


def test_time_spent_in_a_replay_counts_towards_the_next_checkpoint(lab):
    """Else a run that is killed every few minutes would never write one."""
    history(lab, 3)
    ctx = lab.start()
    ctx.state.trained_s = 1e9
    asyncio.run(restore_trainer(ctx, 2))
    assert 0 < ctx.state.trained_s < 10


def test_a_gap_in_the_ledgers_names_the_file(lab):
    history(lab, 3)
    lab.backend.delete(layout.ledger(1))
    ctx = lab.start()
    with pytest.raises(DigestError, match=r"iterations/000001/ledger\.json is missing"):
        asyncio.run(restore_trainer(ctx, 2))


def test_a_chain_that_ends_too_early_says_where(lab):
    history(lab, 2)
    ctx = lab.start()
    with pytest.raises(DigestError, match="chain ends at 1, before iteration 2"):
        asyncio.run(restore_trainer(ctx, 2))
