import math

import numpy as np
import pytest
import torch

from slime_core.algorithms.kl import KL_TYPES, KLCoefficient, kl_estimate, unbiased_ratio
from slime_core.algorithms.log_probs import log_probs_and_entropy
from slime_core.algorithms.losses.value import value_loss
from slime_core.errors import ConfigError


def statement(kind, d):
    k3 = math.exp(-d) - 1 + d
    return {
        "k1": d,
        "k2": d * d / 2,
        "k3": k3,
        "low_var_kl": min(max(k3, -10), 10),
        "abs": abs(d),
    }[kind]


def numeric_gradient(function, at, step=1e-6):
    out = np.zeros_like(at)
    for i in range(len(at)):
        up, down = at.copy(), at.copy()
        up[i] += step
        down[i] -= step
        out[i] = (function(up) - function(down)) / (2 * step)
    return out


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", KL_TYPES)
def test_value_and_gradient_match_an_independent_float64_statement(kind, unbiased):
    rng = np.random.default_rng(0)
    lp, ref, old = (-rng.gamma(2, 1, 12) for _ in range(3))
    mask = rng.random(12) < 0.7
    bad_ref, bad_old = np.where(mask, ref, np.nan), np.where(mask, old, np.nan)

    def value(x):
        ratio = np.exp(x - old) if unbiased else np.ones(12)
        total = 0.0
        for i in np.flatnonzero(mask):
            kl = (
                statement(kind, x[i] - ref[i])
                if kind != "low_var_kl"
                else statement("k3", x[i] - ref[i])
            )
            kl *= ratio[i]
            total += min(max(kl, -10), 10) if kind == "low_var_kl" else kl
        return total

    leaf = torch.tensor(np.where(mask, lp, np.nan), requires_grad=True)
    m = torch.tensor(mask)
    ratio = unbiased_ratio(leaf, torch.tensor(bad_old), m) if unbiased else None
    kl = kl_estimate(leaf, torch.tensor(bad_ref), m, kind, ratio)
    kl.sum().backward()
    assert kl.sum().item() == pytest.approx(value(lp), rel=1e-12)
    np.testing.assert_allclose(leaf.grad.numpy(), numeric_gradient(value, lp), atol=1e-7)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_estimators_are_unbiased_for_the_true_kl(kind):
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.1]], dtype=torch.float64)
    other = torch.tensor([[1.0, 0.5, -0.5, 0.0]], dtype=torch.float64)
    targets, n = torch.arange(4), 4
    p, _ = log_probs_and_entropy(logits.expand(n, -1), targets)
    q, _ = log_probs_and_entropy(other.expand(n, -1), targets)
    mask = torch.ones(n, dtype=torch.bool)
    expected = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * kl_estimate(p, q, mask, kind)).sum(), expected)


def test_equal_policies_have_no_kl_and_an_unknown_kind_is_named():
    lp, mask = torch.tensor([-1.0, -2.0]), torch.ones(2, dtype=torch.bool)
    for kind in KL_TYPES:
        assert kl_estimate(lp, lp, mask, kind).tolist() == [0.0, 0.0]
    with pytest.raises(ConfigError, match="did you mean k3"):
        kl_estimate(lp, lp, mask, "k33")


def test_k3_keeps_its_digits_in_float32_where_policies_are_close():
    d = torch.tensor([1e-3, -1e-3, 1e-4, -1e-4, 1e-5])
    kl = kl_estimate(d, torch.zeros(5), torch.ones(5, dtype=torch.bool), "k3")
    expected = [math.expm1(-x) + x for x in d.double().tolist()]
    assert kl.tolist() == pytest.approx(expected, rel=1e-2)


def test_only_low_var_kl_is_clamped():
    lp, ref, mask = torch.tensor([-9.0]), torch.tensor([-1.0]), torch.tensor([True])
    assert kl_estimate(lp, ref, mask, "low_var_kl").item() == 10.0
    assert kl_estimate(lp, ref, mask, "k3").item() == pytest.approx(math.exp(8) - 9, rel=1e-6)


def test_the_kl_coefficient_follows_its_target():
    start = KLCoefficient(0.1, target=1.0, horizon=1000)
    assert start.after(1.0, 100).value == 0.1
    assert start.after(1.1, 100).value == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert start.after(50.0, 100).value == pytest.approx(0.1 * 1.02)
    assert start.after(0.0, 100).value == pytest.approx(0.1 * 0.98)
    assert KLCoefficient(0.1).after(9.0, 100).value == 0.1
    with pytest.raises(ConfigError, match="positive"):
        KLCoefficient(0.1, target=0.0)


def test_value_loss_and_gradient_match_an_independent_float64_statement():
    rng = np.random.default_rng(1)
    new, old, target = (rng.normal(size=15) for _ in range(3))
    mask = rng.random(15) < 0.7

    def value(x):
        total = 0.0
        for i in np.flatnonzero(mask):
            bounded = min(max(x[i], old[i] - 0.2), old[i] + 0.2)
            total += max((x[i] - target[i]) ** 2, (bounded - target[i]) ** 2)
        return total

    leaf = torch.tensor(np.where(mask, new, np.nan), requires_grad=True)
    poisoned = (torch.tensor(np.where(mask, x, np.nan)) for x in (old, target))
    result = value_loss(leaf, *poisoned, torch.tensor(mask), 0.2)
    loss = result.values[torch.tensor(mask)].sum()
    loss.backward()
    assert loss.item() == pytest.approx(value(new), rel=1e-12)
    np.testing.assert_allclose(leaf.grad.numpy(), numeric_gradient(value, new), atol=1e-7)
    assert 0 < result.metrics["value_clipfrac"].sum() < mask.sum()
