"""Gradients of several algorithms on one batch, with stand-in weights."""

import math

import numpy as np
import pytest

from slime_core.errors import ConfigError
from slime_core.run.compare import compare, cosine
from slime_core.run.identity import recorded_config
from slime_core.run.replay import Replay
from tests.unit.run.test_replay import StandInRank, ctx

__all__ = ["ctx"]


class ProbedRank(StandInRank):
    """Its gradient says which rewards and weights it was asked with."""

    def probe(self, batch, seed):
        assert seed and self.trainer.state
        gradient = np.array([batch.rewards.max(), 1.0], dtype=np.float32)
        return {"loss": 0.5, "grad_norm": 2.0, "gradient": gradient, "effective_samples": 4.0}


def compared(ctx, tmp_path, k, **variants):
    def config_of(changes):
        return lambda ledger: recorded_config(ctx.backend, ledger.numeric_digest, changes)

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    replay = Replay(ctx.cache, ProbedRank, config_of({}), scratch)
    return compare(replay, k, {name: config_of(changes) for name, changes in variants.items()})


def test_each_algorithm_sees_its_own_rewards_and_the_same_weights(ctx, tmp_path):
    before = ctx.backend.list()
    found = compared(
        ctx, tmp_path, 3, then={}, gspo={"advantage_estimator": "gspo"},
        rloo={"advantage_estimator": "rloo"},
    )  # fmt: skip
    assert [one.algorithm for one in found] == ["then", "gspo", "rloo"]
    first, *others = found
    assert first.cosine == pytest.approx(1.0)
    # The stored batch names rewards up to 3.5, which no algorithm makes of rewards that are all 1.
    assert [one.cosine for one in others] == pytest.approx([1 / math.hypot(3.5, 1)] * 2)
    assert (first.loss, first.grad_norm, first.effective_samples) == (0.5, 2.0, 4.0)
    assert ctx.backend.list() == before, "nothing is written to the run"
    assert all(rank.closed for rank in StandInRank.made)
    trained = [entry for rank in StandInRank.made for entry in rank.trainer.log]
    assert "replay 3" not in trained, "batch 3 is looked at, not trained"


def test_an_iteration_that_is_not_there(ctx, tmp_path):
    with pytest.raises(ConfigError, match="the run has 0:5"):
        compared(ctx, tmp_path, 5, then={})


def test_cosine():
    a, b = np.array([3.0, 4.0]), np.array([4.0, -3.0])
    assert cosine(a, 7 * a) == pytest.approx(1.0) and cosine(a, -a) == pytest.approx(-1.0)
    assert cosine(a, b) == pytest.approx(0.0, abs=1e-12)
    assert math.isnan(cosine(a, 0 * a))
