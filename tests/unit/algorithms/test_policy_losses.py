"""Each loss: gradient against an independent float64 statement, and the invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.algorithms.losses.reductions import token_weights, weighted_sum
from slime_core.algorithms.losses.types import PolicyInputs, PolicyOptions
from slime_core.algorithms.registry import POLICY_LOSSES, get_policy_loss
from slime_core.errors import ConfigError

OPTIONS = PolicyOptions(eps_clip=0.2, eps_clip_high=0.28)
DUAL = PolicyOptions(eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=1.5)
CASES = [(name, OPTIONS) for name in POLICY_LOSSES] + [("ppo", DUAL), ("gspo", DUAL)]


def clip(x, low, high):
    return min(max(x, low), high)


def clipped(ratio, adv, o):
    loss = max(-ratio * adv, -clip(ratio, 1 - o.eps_clip, 1 + o.high) * adv)
    return min(loss, -o.eps_clip_c * adv) if o.eps_clip_c and adv < 0 else loss


def statement(name, lp, frozen, tokens, o):
    """Token losses by plain loops; `frozen` stands for log_probs without gradient."""
    out = np.zeros(len(lp))
    for row in range(tokens.num_rows):
        here = [i for i in range(len(lp)) if tokens.rows[i] == row and tokens.mask[i]]
        if not here:
            continue
        advs = [tokens.advantages[i] for i in here]
        deltas = [lp[i] - tokens.old[i] for i in here]
        if name == "gmpo":
            bounded = [
                min(d, o.high) if a >= 0 else max(d, -o.eps_clip)
                for d, a in zip(deltas, advs, strict=True)
            ]
            sequence = -np.mean(advs) * math.exp(np.mean(bounded))
        for i, d, a in zip(here, deltas, advs, strict=True):
            if name == "ppo":
                out[i] = clipped(math.exp(d), a, o)
            elif name == "gspo":
                out[i] = clipped(math.exp(np.mean(deltas)), a, o)
            elif name == "cispo":
                weight = clip(math.exp(frozen[i] - tokens.old[i]), 1 - o.eps_clip, 1 + o.high)
                out[i] = -weight * a * lp[i]
            elif name == "sapo":
                tau = o.sapo_tau_pos if a > 0 else o.sapo_tau_neg
                out[i] = -a * 4 / tau / (1 + math.exp(-tau * (math.exp(d) - 1)))
            elif name == "gmpo":
                out[i] = sequence
            elif name == "ipo_tv":
                moved = abs(math.exp(frozen[i]) - math.exp(tokens.old[i]))
                kept = moved <= o.ipo_threshold
                out[i] = -a * math.exp(d) * kept + o.ipo_kl_tau * d * d
            elif name == "policy_gradient":
                out[i] = -a * lp[i]
            elif name == "sft":
                out[i] = -lp[i]
            else:
                raise AssertionError(f"no statement of {name}")
    return out


def sample_mean(values, tokens):
    total = 0.0
    for row in range(tokens.num_rows):
        here = (tokens.rows == row) & tokens.mask
        total += values[here].sum() / max(here.sum(), 1)
    return total / tokens.num_rows


def reduce(name, options, tokens, *, rollouts=None, dtype=torch.float64):
    inputs, leaf = tokens.inputs(dtype)
    result = POLICY_LOSSES[name](inputs, options)
    weights = token_weights(
        "sample_mean",
        inputs.rows,
        tokens.denominators(),
        rollouts=rollouts or tokens.num_rows,
        tokens=int(tokens.mask.sum()),
    )
    loss = weighted_sum(result.values, inputs.mask, weights)
    metrics = {k: weighted_sum(v, inputs.mask, weights) for k, v in result.metrics.items()}
    loss.backward()
    return loss.item(), leaf.grad.numpy(), {k: v.item() for k, v in metrics.items()}


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_match_an_independent_float64_statement(
    make_tokens, name, options, seed
):
    tokens = make_tokens(seed)
    loss, grad, _ = reduce(name, options, tokens)

    def value(lp):
        return sample_mean(statement(name, lp, tokens.log_probs, tokens, options), tokens)

    assert loss == pytest.approx(value(tokens.log_probs), rel=1e-12)
    step = 1e-6
    numeric = np.zeros_like(grad)
    for i in range(len(grad)):
        up, down = tokens.log_probs.copy(), tokens.log_probs.copy()
        up[i] += step
        down[i] -= step
        numeric[i] = (value(up) - value(down)) / (2 * step)
    np.testing.assert_allclose(grad, numeric, atol=1e-8)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_whatever_stands_outside_the_mask_changes_nothing(make_tokens, name, options):
    tokens = make_tokens(1)
    expected = reduce(name, options, tokens)
    for poison in (math.nan, math.inf, -math.inf, 1e30):
        bad = make_tokens(1)
        for column in (bad.log_probs, bad.old, bad.advantages):
            column[~bad.mask] = poison
        loss, grad, metrics = reduce(name, options, bad)
        assert (loss, metrics) == (expected[0], expected[2])
        assert np.array_equal(grad, expected[1])
        assert not grad[~bad.mask].any()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_padding_changes_nothing(make_tokens, name, options):
    tokens = make_tokens(2)
    loss, grad, metrics = reduce(name, options, tokens)
    longest = np.bincount(tokens.rows).max() + 2
    padded = make_tokens(2, lengths=(longest,) * tokens.num_rows)
    place = np.concatenate(
        [
            np.flatnonzero(padded.rows == r)[: (tokens.rows == r).sum()]
            for r in range(tokens.num_rows)
        ]
    )
    for column in ("log_probs", "old", "advantages"):
        getattr(padded, column)[:] = math.nan
        getattr(padded, column)[place] = getattr(tokens, column)
    padded.mask[:] = False
    padded.mask[place] = tokens.mask
    loss_2, grad_2, metrics_2 = reduce(name, options, padded)
    assert loss_2 == pytest.approx(loss, rel=1e-12)
    assert metrics_2 == pytest.approx(metrics, rel=1e-12)
    np.testing.assert_allclose(grad_2[place], grad, rtol=1e-12)


@given(
    seed=st.integers(0, 20),
    order=st.permutations(range(5)),
    cuts=st.sets(st.integers(1, 4)),
    case=st.sampled_from(CASES),
)
def test_order_and_micro_batch_split_change_nothing(make_tokens, seed, order, cuts, case):
    name, options = case
    tokens = make_tokens(seed)
    loss, grad, metrics = reduce(name, options, tokens)
    pieces = np.split(np.array(order), sorted(cuts))
    results = [reduce(name, options, tokens.keep(p), rollouts=tokens.num_rows) for p in pieces]
    assert sum(r[0] for r in results) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    for metric in metrics:
        total = sum(r[2][metric] for r in results)
        assert total == pytest.approx(metrics[metric], rel=1e-9, abs=1e-12)
    moved = np.concatenate([np.flatnonzero(tokens.rows == row) for row in order])
    np.testing.assert_allclose(np.concatenate([r[1] for r in results]), grad[moved], atol=1e-12)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_on_policy_the_ratio_says_nothing_and_nothing_is_clipped(make_tokens, name, options):
    tokens = make_tokens(3)
    tokens.log_probs = tokens.old.copy()
    _, grad, metrics = reduce(name, options, tokens)
    assert metrics.get("ppo_kl", 0.0) == metrics.get("pg_clipfrac", 0.0) == 0.0
    if name != "sft":
        share = tokens.denominators().numpy().clip(min=1)[tokens.rows] * tokens.num_rows
        np.testing.assert_allclose(grad, -tokens.advantages * tokens.mask / share, rtol=1e-9)


def test_huge_ratios_stay_finite(make_tokens):
    tokens = make_tokens(4)
    tokens.log_probs = tokens.old + np.where(np.arange(len(tokens.old)) % 2, 500.0, -500.0)
    for name in POLICY_LOSSES:
        loss, grad, _ = reduce(name, OPTIONS, tokens, dtype=torch.float32)
        assert math.isfinite(loss) and np.isfinite(grad).all()


def test_a_micro_batch_without_trained_tokens_is_zero_with_a_gradient_path(make_tokens):
    tokens = make_tokens(5)
    tokens.mask[:] = False
    for name in POLICY_LOSSES:
        loss, grad, _ = reduce(name, OPTIONS, tokens)
        assert loss == 0.0 and not grad.any()


def test_inputs_of_wrong_shape_or_type_are_refused():
    one = torch.zeros(1)
    with pytest.raises(TypeError, match="bool"):
        PolicyInputs(one, one, one, one, torch.zeros(1, dtype=torch.long), 1)
    with pytest.raises(ValueError, match="advantages has shape"):
        PolicyInputs(one, one, torch.zeros(2), one.bool(), torch.zeros(1, dtype=torch.long), 1)


def test_options_and_names_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="eps-clip-c must be above 1"):
        PolicyOptions(eps_clip_c=1.0)
    with pytest.raises(ConfigError, match="must not be negative"):
        PolicyOptions(eps_clip=-0.1)
    with pytest.raises(ConfigError, match="SAPO"):
        PolicyOptions(sapo_tau_neg=0)
    with pytest.raises(ConfigError, match="did you mean gspo"):
        get_policy_loss("gsp")
