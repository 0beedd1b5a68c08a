"""Token advantages of whole estimators, against the formulas written out in plain Python."""

import math

import numpy as np
import pytest
import torch

from slime_core.algorithms.advantages.assemble import AdvantageInputs, token_advantages
from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.errors import DataError

LENGTHS = [3, 4, 1]
MASK = [[1, 1, 0], [1, 0, 1, 1], [1]]
REWARDS = [1.0, -0.5, 0.25]
RNG = np.random.default_rng(3)
OLD, REF, VALUES = (
    [RNG.normal(-1, 0.5, n).astype(np.float32).tolist() for n in LENGTHS] for _ in range(3)
)


def flat(rows, dtype=torch.float32):
    return torch.tensor([value for row in rows for value in row], dtype=dtype)


def inputs(**changes):
    columns = {
        "rewards": torch.tensor(REWARDS, dtype=torch.float64),
        "lengths": torch.tensor(LENGTHS),
        "mask": flat(MASK, torch.bool),
        "log_probs": flat(OLD),
        "ref_log_probs": flat(REF),
        "values": flat(VALUES),
    }
    return AdvantageInputs(**{**columns, **changes})


def settings(name, **changes):
    whiten = name.startswith("reinforce")
    return AlgorithmSettings(
        **{"advantage_estimator": name, "normalize_advantages": whiten} | changes
    )


def whitened(rows):
    """Mean 0 and unbiased variance 1 over all trained tokens."""
    values = [
        v for row, mask in zip(rows, MASK, strict=True) for v, m in zip(row, mask, strict=True) if m
    ]
    mean = sum(values) / len(values)
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return [[(v - mean) / math.sqrt(variance + 1e-8) for v in row] for row in rows]


def shaped(row, kl_coef):
    """-kl_coef k1 on trained tokens, the reward on the last of them."""
    last = max(i for i, m in enumerate(MASK[row]) if m)
    return [
        -kl_coef * m * (OLD[row][i] - REF[row][i]) + (REWARDS[row] if i == last else 0.0)
        for i, m in enumerate(MASK[row])
    ]


def assert_on_trained(found, want):
    for got, expected, trained in zip(
        found.tolist(), flat(want).tolist(), flat(MASK).tolist(), strict=True
    ):
        if trained:
            assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "rloo", "gpg", "opo", "max_rl"])
def test_group_estimators_put_the_sealed_reward_on_every_token(name):
    found = token_advantages(settings(name), inputs()).advantages
    assert found.dtype == torch.float32
    assert found.tolist() == [r for r, n in zip(REWARDS, LENGTHS, strict=True) for _ in range(n)]


def test_whitening_is_over_all_trained_tokens():
    found = token_advantages(settings("grpo", normalize_advantages=True), inputs()).advantages
    assert_on_trained(found, whitened([[r] * n for r, n in zip(REWARDS, LENGTHS, strict=True)]))


@pytest.mark.parametrize(("gamma", "kl_coef"), [(1.0, 0.0), (0.9, 0.2)])
def test_reinforce_plus_plus_is_whitened_discounted_returns(gamma, kl_coef):
    found = token_advantages(
        settings("reinforce_plus_plus", gamma=gamma, kl_coef=kl_coef), inputs()
    ).advantages
    returns = []
    for row in range(3):
        rewards = shaped(row, kl_coef)
        returns.append(
            [
                sum(gamma ** (s - t) * rewards[s] for s in range(t, len(rewards)))
                for t in range(len(rewards))
            ]
        )
    assert_on_trained(found, whitened(returns))


def test_the_baseline_variant_subtracts_the_kl_of_each_token():
    found = token_advantages(
        settings("reinforce_plus_plus_baseline", kl_coef=0.3, kl_loss_type="k2"), inputs()
    ).advantages
    rows = [
        [REWARDS[r] - 0.3 * (OLD[r][i] - REF[r][i]) ** 2 / 2 for i in range(LENGTHS[r])]
        for r in range(3)
    ]
    assert_on_trained(found, whitened(rows))


@pytest.mark.parametrize(("gamma", "lam", "kl_coef"), [(1.0, 1.0, 0.0), (0.95, 0.9, 0.1)])
def test_ppo_is_gae_over_trained_tokens(gamma, lam, kl_coef):
    made = token_advantages(settings("ppo", gamma=gamma, lambd=lam, kl_coef=kl_coef), inputs())
    advantages, returns = [], []
    for row in range(3):
        places = [i for i, m in enumerate(MASK[row]) if m]
        rewards, values = shaped(row, kl_coef), VALUES[row]
        out, following, value_after = {}, 0.0, 0.0
        for i in reversed(places):
            delta = rewards[i] + gamma * value_after - values[i]
            following = delta + gamma * lam * following
            out[i], value_after = following, values[i]
        advantages.append([out.get(i, 0.0) for i in range(LENGTHS[row])])
        returns.append([out[i] + values[i] if i in out else 0.0 for i in range(LENGTHS[row])])
    assert_on_trained(made.advantages, advantages)
    assert_on_trained(made.returns, returns)


def test_untrained_places_do_not_matter():
    poison = [
        [v if m else float("nan") for v, m in zip(row, mask, strict=True)]
        for row, mask in zip(OLD, MASK, strict=True)
    ]
    for name, changes in (
        ("reinforce_plus_plus", {"kl_coef": 0.2}),
        ("reinforce_plus_plus_baseline", {"kl_coef": 0.2}),
        ("ppo", {"kl_coef": 0.2, "lambd": 0.9, "normalize_advantages": True}),
    ):
        clean = token_advantages(settings(name, **changes), inputs()).advantages
        dirty = token_advantages(
            settings(name, **changes), inputs(log_probs=flat(poison))
        ).advantages
        trained = flat(MASK, torch.bool)
        assert torch.equal(clean[trained], dirty[trained]), name


def test_a_row_that_no_step_trains_does_not_enter_the_whitening():
    mask = flat(MASK, torch.bool).clone()
    mask[:3] = False
    other = inputs(mask=mask, rewards=torch.tensor([1e6, -0.5, 0.25], dtype=torch.float64))
    found = token_advantages(settings("grpo", normalize_advantages=True), other).advantages
    kept = found[mask]
    assert kept.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert kept.std().item() == pytest.approx(1.0, rel=1e-5)


def test_what_is_missing_is_named():
    with pytest.raises(DataError, match="needs critic values"):
        token_advantages(settings("ppo"), inputs(values=None))
    with pytest.raises(DataError, match="log-probs of the policy and of the reference"):
        token_advantages(settings("ppo", kl_coef=0.1), inputs(ref_log_probs=None))
