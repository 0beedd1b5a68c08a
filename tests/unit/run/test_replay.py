"""Replays on stand-in weights: what is loaded, trained and compared."""

import asyncio
from pathlib import Path

import pytest

from slime_core.cluster.train_call import TrainCall
from slime_core.config.fields import numeric_digest
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError, DigestError
from slime_core.run.identity import record_config, recorded_config
from slime_core.run.replay import Replay
from slime_core.stages.train import train
from tests.unit.stages.standins import INITIAL, Lab, StandInTrainer, packed

ITERATIONS = 5


class StandInRank:
    """The stand-in trainer as one rank. Other learning rates give other weights."""

    made: list["StandInRank"]

    def __init__(self, config: RunConfig) -> None:
        self.trainer, self.config, self.closed = StandInTrainer(config), config, False
        self.made.append(self)

    def setup(self):
        return {"weights_digest": INITIAL}

    def set_state(self, state):
        self.trainer.state = state

    def load(self, directory):
        return asyncio.run(self.trainer.invoke("load", directory))

    def save(self, directory):
        asyncio.run(self.trainer.invoke("save", directory))

    def export_hf(self, directory, version):
        Path(directory).write_text(f"{version} {self.trainer.weights}")

    def train(self, epoch, expect, next_state, batch_digest, batch, seed, forced_skips=None):
        assert batch.group_ids.size
        iteration = len(self.trainer.log)
        call = TrainCall(iteration, epoch, expect, next_state, batch_digest, seed, forced_skips)
        return asyncio.run(self.trainer.train(call))

    def close(self):
        self.closed = True


@pytest.fixture
def ctx(tmp_path, monkeypatch):
    """A run of five iterations with a checkpoint after 2 and 4 (and its configuration)."""
    monkeypatch.setattr(StandInRank, "made", [], raising=False)
    ctx = Lab(tmp_path, num_rollout=ITERATIONS, save_interval=3).start()
    record_config(ctx.backend, ctx.config)
    asyncio.run(ctx.trainer.invoke("set_state", ctx.start_state))
    ctx.state.digest = ctx.start_state
    for k in range(ITERATIONS):
        asyncio.run(train(ctx, packed(ctx, k)))
    return ctx


def made(ctx, tmp_path) -> Replay:
    def recorded(ledger):
        return recorded_config(ctx.backend, ledger.numeric_digest, {})

    (tmp_path / "scratch").mkdir(exist_ok=True)
    return Replay(ctx.cache, StandInRank, recorded, tmp_path / "scratch")


def replayed(ctx, tmp_path, iterations, **changes):
    def changed(ledger):
        return recorded_config(ctx.backend, ledger.numeric_digest, changes)

    replay = made(ctx, tmp_path)
    return list(replay.run(iterations, changed if changes else None))


def test_an_honest_replay_gives_the_same_weights(ctx, tmp_path):
    before = ctx.backend.list()
    found = replayed(ctx, tmp_path, range(1, 5))
    assert [one.iteration for one in found] == [1, 2, 3, 4]
    assert all(one.same and one.loss == one.loss_now == 0.5 for one in found)
    assert ctx.backend.list() == before, "nothing is written to the run"
    assert all(rank.closed for rank in StandInRank.made)


def test_the_newest_checkpoint_before_is_used(ctx, tmp_path):
    assert all(one.same for one in replayed(ctx, tmp_path, range(3, 5)))
    (rank,) = StandInRank.made
    assert rank.trainer.log[0] == "load" and len(rank.trainer.log) == 3


@pytest.mark.parametrize(
    ("iterations", "log"),
    [(0, []), (2, ["replay 0", "replay 1"]), (3, ["load"]), (4, ["load", "replay 1"])],
)
def test_weights_of_any_iteration_can_be_written_out(ctx, tmp_path, iterations, log):
    """`slime eval`: from the newest checkpoint before, then by training again."""
    replay = made(ctx, tmp_path)
    assert replay.export(iterations, tmp_path / "out") == f"l0-{iterations}"
    (rank,) = StandInRank.made
    assert rank.trainer.log == log and rank.closed
    assert (tmp_path / "out").read_text() == f"l0-{iterations} {rank.trainer.weights}"


def test_weights_that_drift_or_never_were_are_not_written_out(ctx, tmp_path, monkeypatch):
    for wrong in (-1, 6):
        with pytest.raises(ConfigError, match="the run has trained 5"):
            made(ctx, tmp_path).export(wrong, tmp_path / "out")
    drifting = StandInRank.__init__

    def drifts(self, config):
        drifting(self, config)
        self.trainer.drifts = {0, 1, 2, 3}

    monkeypatch.setattr(StandInRank, "__init__", drifts)
    with pytest.raises(DigestError, match="trained again from the store, gives other weights"):
        made(ctx, tmp_path).export(2, tmp_path / "out")
    assert not (tmp_path / "out").exists() and all(rank.closed for rank in StandInRank.made)


def test_changed_values_begin_where_they_are_asked_for(ctx, tmp_path):
    found = replayed(ctx, tmp_path, range(4, 5), lr=1e-3)
    assert [one.same for one in found] == [False]
    before, after = StandInRank.made
    assert [rank.config.train.lr for rank in StandInRank.made] == [1e-6, 1e-3]
    assert before.trainer.log == ["load", "replay 1", "save"]
    assert after.trainer.log[0] == "load" and after.closed and before.closed


def test_each_iteration_has_the_configuration_it_was_trained_with(ctx, tmp_path):
    """A resume may change numbers; the ledgers know from where on."""
    later = ctx.config.model_copy(update={"train": ctx.config.train.model_copy(update={"lr": 1.0})})
    longer = later.model_copy(update={"run": later.run.model_copy(update={"num_rollout": 7})})
    record_config(ctx.backend, longer)
    ctx.config = longer
    for k in (5, 6):
        asyncio.run(train(ctx, packed(ctx, k)))
    replayed(ctx, tmp_path, range(3, 7))
    assert [rank.config.train.lr for rank in StandInRank.made] == [1e-6, 1.0]
    before, after = (rank.trainer.log for rank in StandInRank.made)
    assert before == [f"replay {i}" for i in range(5)] + ["save"]
    assert len(after) == 3, "it loads, then trains 5 and 6"


def test_what_cannot_be_replayed_says_why(ctx, tmp_path, monkeypatch):
    for wrong in (range(3, 6), range(5, 6), range(2, 2)):
        with pytest.raises(ConfigError, match="the run has 0:5"):
            replayed(ctx, tmp_path, wrong)
    monkeypatch.setattr(StandInRank, "setup", lambda self: {"weights_digest": "another model"})
    with pytest.raises(DigestError, match="does not hold the weights that the run began with"):
        replayed(ctx, tmp_path, range(1))
    with pytest.raises(ConfigError, match="does not hold the configuration"):
        recorded_config(ctx.backend, "0" * 64, {})


def test_the_configuration_comes_back_without_what_may_be_secret(ctx):
    config = ctx.config.model_copy(update={"sglang": {"api_key": "hidden"}})
    record_config(ctx.backend, config)
    again = recorded_config(ctx.backend, numeric_digest(config), {})
    assert again == config.model_copy(update={"sglang": {}})
    assert not any(b"hidden" in ctx.backend.get(e.key) for e in ctx.backend.list("configs/"))


def test_an_iteration_of_several_ranks_comes_back_for_one(ctx):
    megatron = {"weight_decay": 0.5, "tensor_model_parallel_size": 2}
    cluster = ctx.config.cluster.model_copy(update={"device": "cpu", "actor_num_gpus_per_node": 2})
    config = ctx.config.model_copy(update={"megatron": megatron, "cluster": cluster})
    record_config(ctx.backend, config)
    again = recorded_config(ctx.backend, numeric_digest(config), {"actor_num_gpus_per_node": 1})
    assert again.megatron == {"weight_decay": 0.5}
    assert again.cluster.actor_num_gpus_per_node == 1
