"""When a checkpoint is written, how it becomes final, and what is removed."""

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest

from slime_core.config.loading import load_config
from slime_core.errors import ConfigError, TrainerError, UnavailableError
from slime_core.run.best import best_checkpoint
from slime_core.run.checkpoints import is_due, remove_old, save_if_due, settle
from slime_core.run.context import RunContext
from slime_core.stages.train import train
from slime_core.store.checkpoints import fetch_checkpoint, list_checkpoints
from slime_core.store.documents import put_document
from tests.unit.config.trees import SMALL
from tests.unit.stages.standins import Lab, packed


def ready(tmp_path: Path, **overrides: object) -> RunContext:
    ctx = Lab(tmp_path, **overrides).start()
    asyncio.run(ctx.trainer.invoke("set_state", ctx.start_state))
    ctx.state.digest = ctx.start_state
    return ctx


def train_all(ctx: RunContext, iterations: range) -> None:
    for k in iterations:
        asyncio.run(train(ctx, packed(ctx, k)))


def kept(ctx: RunContext) -> list[int]:
    return [checkpoint.iteration for checkpoint in list_checkpoints(ctx.backend)]


def test_one_is_due_at_the_end_at_each_interval_and_after_much_training(tmp_path):
    ctx = ready(tmp_path, num_rollout=10, save_interval=4, max_replay_s=100)
    assert [k for k in range(10) if is_due(ctx, k)] == [3, 7, 9]
    ctx.state.trained_s = 100.1
    assert is_due(ctx, 0)


def test_without_an_interval_only_time_and_the_end_count(tmp_path):
    ctx = ready(tmp_path, num_rollout=5)
    assert [k for k in range(5) if is_due(ctx, k)] == [4]


def test_the_newest_two_stay_and_each_can_be_loaded(tmp_path):
    ctx = ready(tmp_path, save_interval=1)
    train_all(ctx, range(4))
    assert kept(ctx) == [3, 2]
    folder = ctx.backend.local_path("checkpoints")
    assert folder is not None
    assert len(list(folder.iterdir())) == 2, "nothing is left of the removed ones"
    for checkpoint in list_checkpoints(ctx.backend):
        assert (fetch_checkpoint(ctx.cache, checkpoint) / "rank").is_file()
        assert checkpoint.weight_version == f"l0-{checkpoint.iteration + 1}"
        assert checkpoint.about.keys() >= {"numeric_digest", "identity_digest", "segment"}
    assert list_checkpoints(ctx.backend)[0].state == ctx.state.digest


def evaluated(ctx: RunContext, version: int, reward: float) -> None:
    body = {"dataset": "held", "version": f"l0-{version}", "iteration": version}
    put_document(
        ctx.backend, f"evals/l0-{version}/held.json", body | {"metrics": {"reward": reward}}
    )


@pytest.mark.parametrize(("lowest", "best"), [(False, 1), (True, 2)])
def test_the_best_by_a_metric_stays_beside_the_newest_two(tmp_path, lowest, best):
    ctx = ready(
        tmp_path, save_interval=1, num_rollout=7, save_best_metric="eval/held",
        save_best_lowest=lowest,
    )  # fmt: skip
    rewards = [0.5, 0.9, 0.2, 0.6, float("nan"), 0.7]
    for k, reward in enumerate(rewards):
        train_all(ctx, range(k, k + 1))
        evaluated(ctx, k + 1, reward)
    train_all(ctx, range(6, 7))
    assert kept(ctx) == [6, 5, best]
    found = best_checkpoint(ctx.backend, list_checkpoints(ctx.backend), "eval/held", lowest=lowest)
    assert found is not None and (found[0].iteration, found[1]) == (best, rewards[best])


def test_a_checkpoint_is_judged_by_numbers_of_its_last_iteration_too(tmp_path):
    ctx = ready(tmp_path, save_interval=1)
    train_all(ctx, range(2))
    newest = list_checkpoints(ctx.backend)
    found = best_checkpoint(ctx.backend, newest, "train/loss")
    assert found is not None and (found[0].iteration, found[1]) == (1, 0.5), "the newest of equals"
    assert best_checkpoint(ctx.backend, newest, "eval/held") is None
    assert best_checkpoint(ctx.backend, newest, "no/such") is None


def test_saving_starts_the_clock_anew_and_the_same_state_is_saved_once(tmp_path):
    ctx = ready(tmp_path, max_replay_s=100)
    train_all(ctx, range(1))
    assert kept(ctx) == [] and ctx.state.trained_s > 0
    ctx.state.trained_s = 101
    asyncio.run(save_if_due(ctx, 0))
    assert kept(ctx) == [0] and ctx.state.trained_s == 0
    ctx.state.trained_s = 101
    asyncio.run(save_if_due(ctx, 0))
    assert ctx.trainer.log.count("save") == 1  # type: ignore[attr-defined]


def test_what_a_killed_save_left_is_removed_and_never_counts(tmp_path):
    ctx = ready(tmp_path, save_interval=1)
    folder = ctx.backend.local_path("checkpoints")
    assert folder is not None
    for name in ("000000-000000", "000001-000009.partial"):
        (folder / name).mkdir(parents=True)
        (folder / name / "half").write_text("x")
    train_all(ctx, range(1))
    assert kept(ctx) == [0]
    assert [path.name for path in folder.iterdir()] == ["000000-000000"]
    assert not (folder / "000000-000000" / "half").exists()


def test_a_save_that_fails_leaves_no_final_checkpoint(tmp_path, monkeypatch):
    ctx = ready(tmp_path, save_interval=1)
    train_all(ctx, range(1))
    plain = ctx.trainer.invoke

    async def invoke(method: str, *args: str) -> object:
        if method == "save":
            raise TrainerError("no space left on device")
        return await plain(method, *args)

    monkeypatch.setattr(ctx.trainer, "invoke", invoke)
    with pytest.raises(TrainerError, match="no space left"):
        train_all(ctx, range(1, 2))
    assert kept(ctx) == [0]


def test_a_manifest_is_removed_before_its_files(tmp_path, monkeypatch):
    """Killed between the two, half a folder must not count."""
    ctx = ready(tmp_path, save_interval=1)
    train_all(ctx, range(2))

    plain = ctx.backend.delete

    def killed(key: str) -> None:
        plain(key)
        raise KeyboardInterrupt

    monkeypatch.setattr(ctx.backend, "delete", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_old(ctx.cache, 1)
    assert kept(ctx) == [1]


async def train_beside(ctx: RunContext, iterations: range) -> None:
    for k in iterations:
        await train(ctx, packed(ctx, k))


def test_one_written_beside_training_counts_once_it_is_complete(tmp_path):
    ctx = ready(tmp_path, save_interval=2, async_save=True)
    trainer: Any = ctx.trainer

    async def run() -> None:
        trainer.written = False
        await train_beside(ctx, range(2))
        saved = ctx.state.digest
        await train_beside(ctx, range(2, 3))
        assert kept(ctx) == [] and ctx.saving is not None, "training did not wait for it"
        trainer.written = True
        await settle(ctx)
        (checkpoint,) = list_checkpoints(ctx.backend)
        assert (checkpoint.iteration, checkpoint.state) == (1, saved)
        assert checkpoint.weight_version == "l0-2", "of the moment it was begun"
        content = (fetch_checkpoint(ctx.cache, checkpoint) / "rank").read_text()
        assert json.loads(content)[0] == saved
        assert ctx.state.trained_s > 0, "iteration 2 came after it"

    asyncio.run(run())


def test_the_next_save_waits_for_the_one_before_and_the_last_for_itself(tmp_path):
    ctx = ready(tmp_path, num_rollout=4, save_interval=1, async_save=True)
    asyncio.run(train_beside(ctx, range(4)))
    assert kept(ctx) == [3, 2] and ctx.saving is None
    assert ctx.trainer.log.count("begin_save") == 4  # type: ignore[attr-defined]


def test_much_training_does_not_begin_a_second_one(tmp_path):
    ctx = ready(tmp_path, max_replay_s=1e-9, async_save=True)
    trainer: Any = ctx.trainer

    async def run() -> None:
        trainer.written = False
        await train_beside(ctx, range(3))
        assert trainer.log.count("begin_save") == 1
        trainer.written = True
        await settle(ctx)
        await train_beside(ctx, range(3, 4))
        assert trainer.log.count("begin_save") == 2
        await settle(ctx)
        assert kept(ctx) == [3, 0]

    asyncio.run(run())


@pytest.mark.parametrize("rebuilt", [False, True])
def test_one_that_fails_beside_training_stops_the_run_unless_its_ranks_are_gone(
    tmp_path, monkeypatch, caplog, rebuilt
):
    ctx = ready(tmp_path, save_interval=2, async_save=True)
    trainer: Any = ctx.trainer
    plain = trainer.invoke

    async def invoke(method: str, *args: str) -> object:
        if method == "finish_save":
            raise TrainerError("rank 1: no space left on device")
        return await plain(method, *args)

    async def run() -> None:
        await train_beside(ctx, range(2))
        monkeypatch.setattr(trainer, "invoke", invoke)
        if rebuilt:
            trainer.builds += 1
        await settle(ctx)

    if rebuilt:
        asyncio.run(run())
        assert "iteration 1 went with the ranks that wrote it" in caplog.text
    else:
        with pytest.raises(TrainerError, match="no space left"):
            asyncio.run(run())
    assert kept(ctx) == [] and ctx.saving is None


def test_one_that_the_store_did_not_take_is_owed_at_the_next_iteration(tmp_path, monkeypatch):
    ctx = ready(tmp_path, save_interval=4, async_save=True)

    def away(*_: object, **__: object) -> None:
        raise UnavailableError("the server asks to come later")

    async def run() -> None:
        await train_beside(ctx, range(3))
        with monkeypatch.context() as patch:
            patch.setattr("slime_core.run.checkpoints.put_checkpoint", away)
            await train_beside(ctx, range(3, 4))
            with pytest.raises(UnavailableError, match="come later"):
                await settle(ctx)
        assert kept(ctx) == [] and is_due(ctx, 4), "not before iteration 7 by its number"
        await train_beside(ctx, range(4, 5))
        await settle(ctx)
        assert kept(ctx) == [4] and not is_due(ctx, 5)

    asyncio.run(run())


def test_weights_are_exported_before_each_checkpoint(tmp_path, monkeypatch):
    asked: list[tuple[str, list[int]]] = []
    template = str(tmp_path / "hf" / "step-{rollout_id}")
    ctx = ready(tmp_path, save_interval=2, save_hf=template)
    trainer: Any = ctx.trainer
    plain = trainer.invoke

    async def invoke(method: str, *args: str) -> object:
        if method == "export_hf":
            asked.append((*args, kept(ctx)))  # type: ignore[arg-type]
        return await plain(method, *args)

    monkeypatch.setattr(trainer, "invoke", invoke)
    train_all(ctx, range(4))
    folders = [str(tmp_path / "hf" / f"step-{k}") for k in (1, 3)]
    assert asked == [(folders[0], "l0-2", []), (folders[1], "l0-4", [1])]
    assert (tmp_path / "hf").is_dir()


@pytest.mark.parametrize("template", ["", "x/{}", "x/{step}", "x/{rollout_id.y}", "{"])
def test_a_folder_for_weights_names_nothing_but_the_iteration(template):
    with pytest.raises(ConfigError, match="rollout_id"):
        load_config(copy.deepcopy(SMALL), {"save_hf": template})
