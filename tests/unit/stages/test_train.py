"""Every iteration is trained exactly once, whatever the trainer does and wherever it was killed."""

import asyncio
from pathlib import Path

import pytest

from slime_core.cluster.train_call import TrainCall
from slime_core.config.fields import numeric_digest
from slime_core.errors import DeadlineError, DigestError, StoreError, TrainerError
from slime_core.refs import Ref
from slime_core.run.context import RunContext
from slime_core.stages.train import train
from slime_core.store.checkpoints import list_checkpoints
from slime_core.store.ledger import next_state, read_ledger
from tests.unit.stages.standins import Lab, end, packed


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def ready(lab: Lab) -> RunContext:
    ctx = lab.start()
    asyncio.run(ctx.trainer.invoke("set_state", ctx.start_state))
    ctx.state.digest = ctx.start_state
    return ctx


def run(ctx: RunContext, batch: Ref) -> Ref:
    return asyncio.run(train(ctx, batch))


def trains(ctx: RunContext) -> list[str]:
    return [line for line in ctx.trainer.log if "train" in line or "replay" in line]  # type: ignore[attr-defined]


def undisturbed(folder: Path, iterations: int) -> list[tuple[str, str]]:
    """(state, weights) after each iteration of a run where nothing fails."""
    ctx = ready(Lab(folder))
    found = []
    for k in range(iterations):
        run(ctx, packed(ctx, k))
        found.append((ctx.state.digest, ctx.trainer.weights))  # type: ignore[attr-defined]
    return found


def test_the_ledger_names_what_was_trained(lab):
    ctx = ready(lab)
    batch = packed(ctx, 0)
    ref = run(ctx, batch)
    ledger = read_ledger(ctx.backend, 0)
    assert ledger is not None and (ref.uri, ref.digest) == (
        "iterations/000000/ledger.json",
        ledger.digest,
    )
    assert ledger.parent == ctx.start_state and ledger.batch_digest == batch.digest
    assert ledger.state == next_state(ctx.start_state, batch.digest, numeric_digest(ctx.config))
    assert ledger.state == ctx.state.digest and ledger.weight_version == ctx.state.version == "l0-1"
    assert ledger.result["steps"][0]["weights_digest"] == ctx.trainer.weights
    assert "seconds" not in ledger.result, "times say nothing about what was trained"
    assert ledger.by["train_seconds"] == {"all": 1.0} and ledger.by["epoch"] == ctx.lease.epoch


def test_a_trained_iteration_is_not_trained_again(lab):
    ctx = ready(lab)
    batch = packed(ctx, 0)
    first, second = run(ctx, batch), run(ctx, batch)
    assert second.from_store and second.digest == first.digest
    assert trains(ctx) == ["train 0"]


def test_a_ledger_of_another_batch_is_refused(lab):
    ctx = ready(lab)
    batch = packed(ctx, 0)
    run(ctx, batch)
    other = Ref(batch.uri, "batch", 0, digest="0" * 64)
    with pytest.raises(DigestError, match="iteration 0 was trained on another batch"):
        run(ctx, other)


@pytest.mark.parametrize("failing", ["train", "status", "gone before"])
def test_a_trainer_that_fails_is_rebuilt_and_gives_the_same_weights(lab, tmp_path, failing):
    want = undisturbed(tmp_path / "undisturbed", 3)
    ctx = ready(lab)
    run(ctx, packed(ctx, 0))
    run(ctx, packed(ctx, 1))
    batch = packed(ctx, 2)
    if failing == "train":
        once = iter([True])

        def dies(call: TrainCall) -> None:
            if call.iteration == 2 and next(once, False):
                raise TrainerError("training of iteration 2 failed: its process ended")

        ctx.trainer.before = dies  # type: ignore[attr-defined]
    elif failing == "status":
        ctx.trainer.tainted = True  # type: ignore[attr-defined]
    else:
        ctx.trainer._fresh()  # type: ignore[attr-defined]
    run(ctx, batch)
    assert (ctx.state.digest, ctx.trainer.weights) == want[2]
    assert ctx.trainer.builds == 1 and trains(ctx)[-3:] == ["replay 0", "replay 1", "train 2"]
    assert ctx.trainer.epoch == ctx.lease.epoch, "the new ranks know their owner"


def test_a_trainer_that_fails_again_ends_the_stage_without_a_ledger(lab):
    ctx = ready(lab)

    def dies(call: TrainCall) -> None:
        raise TrainerError("out of memory")

    ctx.trainer.before = dies  # type: ignore[attr-defined]
    with pytest.raises(TrainerError, match="out of memory"):
        run(ctx, packed(ctx, 0))
    assert ctx.trainer.builds == 1 and read_ledger(ctx.backend, 0) is None


def test_a_timeout_is_not_repeated(lab):
    ctx = ready(lab)

    def hangs(call: TrainCall) -> None:
        raise DeadlineError("waited 3600 s for training of iteration 0")

    ctx.trainer.before = hangs  # type: ignore[attr-defined]
    with pytest.raises(DeadlineError):
        run(ctx, packed(ctx, 0))
    assert ctx.trainer.builds == 0 and trains(ctx) == ["train 0"]


def test_a_result_whose_ledger_could_not_be_written_is_taken_from_the_trainer(lab, monkeypatch):
    ctx = ready(lab)
    batch = packed(ctx, 0)
    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> None:
            raise StoreError("no space left")

        patch.setattr("slime_core.stages.train.put_ledger", full)
        with pytest.raises(StoreError):
            run(ctx, batch)
    weights = ctx.trainer.weights  # type: ignore[attr-defined]
    run(ctx, batch)
    assert trains(ctx) == ["train 0"] and ctx.trainer.weights == weights  # type: ignore[attr-defined]
    ledger = read_ledger(ctx.backend, 0)
    assert ledger is not None and ledger.result["steps"][0]["weights_digest"] == weights


def test_ranks_that_were_used_are_never_taken_for_fresh_ones(lab, tmp_path):
    """Another process wrote the ledger that this one finds: its own ranks are behind."""
    want = undisturbed(tmp_path / "undisturbed", 2)
    ctx = ready(lab)
    run(ctx, packed(ctx, 0))
    batch = packed(ctx, 1)
    state_before = ctx.state.digest
    run(ctx, batch)
    ctx.state.digest, ctx.trainer.weights = state_before, "something else"  # type: ignore[attr-defined]
    run(ctx, batch)
    assert (ctx.state.digest, ctx.trainer.weights) == want[1]  # type: ignore[attr-defined]
    assert ctx.trainer.builds == 1  # type: ignore[attr-defined]


def test_skipped_iterations_in_a_row_stop_the_run_also_over_restarts(tmp_path):
    lab = Lab(tmp_path, skipped_steps_limit=3)
    ctx = ready(lab)
    ctx.trainer.skips = {1, 2, 4, 5, 6}  # type: ignore[attr-defined]
    for k in range(6):
        run(ctx, packed(ctx, k))
    with pytest.raises(TrainerError, match=r"3 iterations in a row .*\(the last is 6\)"):
        run(ctx, packed(ctx, 6))
    assert read_ledger(ctx.backend, 6) is not None, "what was trained stays recorded"
    end(ctx)
    again = lab.start()
    again.state.digest = read_ledger(again.backend, 6).state  # type: ignore[union-attr]
    with pytest.raises(TrainerError, match="3 iterations in a row"):
        run(again, Ref("", "batch", 6, digest=read_ledger(again.backend, 6).batch_digest))  # type: ignore[union-attr]


def test_a_checkpoint_follows_the_ledger_when_one_is_due(tmp_path):
    ctx = ready(Lab(tmp_path, save_interval=2))
    run(ctx, packed(ctx, 0))
    assert list_checkpoints(ctx.backend) == []
    run(ctx, packed(ctx, 1))
    (checkpoint,) = list_checkpoints(ctx.backend)
    assert (checkpoint.iteration, checkpoint.state) == (1, ctx.state.digest)
