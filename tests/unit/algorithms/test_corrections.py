import math
from functools import partial

import pytest
import torch

from slime_core.algorithms.corrections import (
    Rejection,
    Tokens,
    importance_weights,
    opsm_mask,
    reject,
    rejection_mask,
    veto_mask,
    weight_scale,
)
from slime_core.algorithms.mismatch import mismatch_metrics
from slime_core.errors import ConfigError

NAN = math.nan
ROWS = torch.tensor([0, 0, 0, 1, 1, 2])
MASK = torch.tensor([True, True, False, True, True, False])
TRAIN = torch.tensor([-1.0, -0.5, NAN, -2.0, -1.0, NAN], dtype=torch.float64)
ROLLOUT = torch.tensor([-1.5, -0.5, NAN, -1.0, -3.0, NAN], dtype=torch.float64)
RATIOS = [math.exp(0.5), 1.0, math.exp(-1.0), math.exp(2.0)]


def tokens():
    return Tokens.of(TRAIN, ROLLOUT, MASK, ROWS, 3)


def trained(values):
    return values[MASK].tolist()


def test_levels_are_the_token_the_product_and_the_geometric_mean():
    by_level = {
        "token": RATIOS,
        "sequence": [math.exp(0.5)] * 2 + [math.exp(1.0)] * 2,
        "geometric": [math.exp(0.25)] * 2 + [math.exp(0.5)] * 2,
    }
    for level, expected in by_level.items():
        result = importance_weights(tokens(), level=level, mode="none")
        assert trained(result.weights) == pytest.approx(expected)


def test_modes_truncate_clip_and_mask():
    low, high = 0.5, 2.0
    expected = {
        "truncate": [min(r, high) for r in RATIOS],
        "clip": [min(max(r, low), high) for r in RATIOS],
        "mask": [r if low <= r <= high else 0.0 for r in RATIOS],
    }
    for mode, weights in expected.items():
        result = importance_weights(tokens(), mode=mode, low=low, high=high)
        assert trained(result.weights) == pytest.approx(weights)
        changed = [float(w != pytest.approx(r)) for w, r in zip(weights, RATIOS, strict=True)]
        assert trained(result.metrics["tis_clipfrac"]) == changed
        assert trained(result.metrics["ois"]) == pytest.approx(RATIOS)


def test_weights_are_zero_outside_the_mask_and_carry_no_gradient():
    leaf = TRAIN.clone().requires_grad_()
    result = importance_weights(Tokens.of(leaf, ROLLOUT, MASK, ROWS, 3))
    assert not result.weights.requires_grad
    assert result.weights[~MASK].tolist() == [0.0, 0.0]


def test_equal_policies_are_left_alone():
    same = Tokens.of(TRAIN, TRAIN, MASK, ROWS, 3)
    for level in ("token", "sequence", "geometric"):
        for mode in ("truncate", "clip", "mask", "none"):
            result = importance_weights(same, level=level, mode=mode, low=0.5, high=2.0)
            assert trained(result.weights) == [1.0] * 4
    assert torch.equal(rejection_mask(same, Rejection("token", "k3", 1e-9)), MASK)
    assert torch.equal(veto_mask(same, 0.9), MASK)


def test_huge_gaps_stay_finite():
    far = Tokens.of(TRAIN + 1e4, ROLLOUT, MASK, ROWS, 3)
    for level in ("token", "sequence", "geometric"):
        assert torch.isfinite(importance_weights(far, level=level, mode="none").weights).all()


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Rejection("token", "k1", 2.0, 0.5), [True, True, False, False]),
        (Rejection("token", "k1", 3.0), [True, True, True, False]),
        (Rejection("token", "k2", 0.5), [True, True, True, False]),
        (Rejection("seq_sum", "k2", 1.0), [True, True, False, False]),
        (Rejection("seq_mean", "k1", 1.5), [True, True, False, False]),
        (Rejection("seq_max", "k2", 0.6), [True, True, False, False]),
        (Rejection("seq_max", "k3", 0.1), [False, False, False, False]),
    ],
)
def test_rejection_keeps_what_is_inside_the_bound(rule, kept):
    mask = rejection_mask(tokens(), rule)
    assert trained(mask) == kept
    assert not mask[~MASK].any()


def test_a_veto_drops_the_whole_row():
    assert trained(veto_mask(tokens(), 0.4)) == [True, True, False, False]


def test_weights_can_be_scaled_to_mean_one():
    weights = importance_weights(tokens(), mode="none").weights
    scale = weight_scale(torch.where(MASK, weights, NAN), MASK)
    assert scale.item() == pytest.approx(4 / sum(RATIOS))
    assert (weights * scale)[MASK].mean().item() == pytest.approx(1.0)
    assert weight_scale(torch.zeros(6), MASK).item() == 1.0


def test_opsm_drops_whole_rows_that_are_bad_and_far():
    new = TRAIN - torch.tensor([1.0, 1.0, NAN, 1.0, 1.0, NAN])
    bad = torch.tensor([-1.0, -1.0, NAN, 1.0, 1.0, NAN])
    keep = opsm_mask(new, TRAIN, bad, MASK, ROWS, 3, delta=0.5)
    assert trained(keep) == [False, False, True, True]
    assert torch.equal(opsm_mask(new, TRAIN, bad, MASK, ROWS, 3, delta=1.5), MASK)


def test_mismatch_metrics_on_known_numbers():
    metrics = mismatch_metrics(TRAIN, ROLLOUT, MASK, ROWS, 3)
    d = [0.5, 0.0, -1.0, 2.0]
    assert trained(metrics["train_rollout_logprob_abs_diff"]) == [0.5, 0.0, 1.0, 2.0]
    assert trained(metrics["mis_kl"]) == [-x for x in d]
    assert trained(metrics["mis_k3_kl"]) == pytest.approx([math.exp(x) - 1 - x for x in d])
    assert trained(metrics["mis_chi2_token"]) == pytest.approx([math.exp(2 * x) - 1 for x in d])
    seq = [math.exp(1.0) - 1] * 2 + [math.exp(2.0) - 1] * 2
    assert trained(metrics["mis_chi2_seq"]) == pytest.approx(seq)
    assert trained(metrics["mis_train_ppl"]) == pytest.approx(
        [math.exp(0.75)] * 2 + [math.exp(1.5)] * 2
    )
    assert trained(metrics["mis_rollout_ppl"]) == pytest.approx(
        [math.exp(1.0)] * 2 + [math.exp(2.0)] * 2
    )
    assert trained(metrics["mis_ppl_ratio"]) == pytest.approx(
        [math.exp(-0.25)] * 2 + [math.exp(-0.5)] * 2
    )
    assert all(torch.isfinite(v[MASK]).all() for v in metrics.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: importance_weights(tokens(), low=3.0, high=2.0), "low <= high"),
        (lambda: importance_weights(tokens(), mode="cut"), "unknown mode"),
        (lambda: importance_weights(tokens(), level="word"), "unknown level"),
        (lambda: Rejection("seq_max", "k1", 2.0), "k2 or k3"),
        (lambda: Rejection("token", "k3", 0.1, 0.05), "no lower bound"),
        (lambda: Rejection("token", "k1", 0.5, 1.0), "low <= high"),
        (lambda: Rejection("row", "k1", 0.5), "unknown rejection scope"),
    ],
)
def test_options_that_cannot_work_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_rejection_zeroes_weights_and_leaves_the_others_alone():
    log_ratio = torch.tensor([0.0, 1.0, -0.1, -3.0, 0.2])
    rows = torch.tensor([0, 0, 0, 1, 1])
    tokens = Tokens(log_ratio, torch.ones(5, dtype=torch.bool), rows, 2)
    bounds = Rejection("token", "k1", 2.0)  # keeps ratios from 1/2 to 2
    alone = reject(tokens, rejection=bounds)
    assert alone.weights.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert alone.metrics["rs_rejected"].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]
    vetoed = reject(tokens, rejection=bounds, veto=0.1)  # exp(-3) < 0.1 takes its row along
    assert vetoed.weights.tolist() == [1.0, 0.0, 1.0, 0.0, 0.0]
    weighed = reject(tokens, partial(importance_weights, high=1.1), bounds)
    assert weighed.weights.tolist() == pytest.approx([1.0, 0.0, math.exp(-0.1), 0.0, 1.1])
    assert {"tis", "rs_rejected"} <= weighed.metrics.keys()
