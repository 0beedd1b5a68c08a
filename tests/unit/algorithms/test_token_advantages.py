import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.algorithms.advantages.tokens import (
    broadcast,
    distill,
    gae,
    kl_shaped,
    last_trained,
    reinforce_plus_plus,
    shaped_rewards,
    whiten,
)
from slime_core.algorithms.ragged import RowLayout, reverse_discounted_sum
from slime_core.errors import DataError

lengths_lists = st.lists(st.integers(0, 9), min_size=1, max_size=5)


def layout_of(lengths):
    return RowLayout(torch.tensor(lengths, dtype=torch.long))


def case(seed, lengths):
    rng = np.random.default_rng(seed)
    n = sum(lengths)
    rewards = torch.tensor(rng.normal(size=len(lengths)))
    kl, values = torch.tensor(rng.normal(size=n)), torch.tensor(rng.normal(size=n))
    return layout_of(lengths), rewards, kl, values, torch.tensor(rng.random(n) < 0.6)


@given(lengths=lengths_lists)
def test_padding_and_back_is_the_identity(lengths):
    layout = layout_of(lengths)
    flat = torch.arange(1.0, sum(lengths) + 1)
    padded = layout.pad(flat)
    assert padded.shape == (len(lengths), max(lengths))
    assert torch.equal(layout.unpad(padded), flat)
    assert padded.sum() == flat.sum()
    assert layout.rows.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]


@given(
    width=st.integers(0, 300),
    chunk=st.sampled_from([1, 7, 128]),
    discount=st.sampled_from([0.0, 0.9, 0.999, 1.0]),
)
def test_the_chunked_scan_equals_the_plain_loop(width, chunk, discount):
    values = torch.tensor(np.random.default_rng(width).normal(size=(3, width)))
    expected, after = torch.zeros_like(values), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(width)):
        after = values[:, t] + discount * after
        expected[:, t] = after
    torch.testing.assert_close(reverse_discounted_sum(values, discount, chunk), expected)


def test_the_last_trained_token_of_each_row():
    mask = torch.tensor([1, 1, 0, 0, 0, 1, 0, 1]).bool()
    found = last_trained(mask, layout_of([3, 2, 0, 3]))
    assert found.tolist() == [False, True, False, False, False, False, False, True]


@given(seed=st.integers(0, 99), lengths=lengths_lists)
def test_gae_equals_a_loop_over_trained_tokens(seed, lengths):
    layout, rewards, kl, values, mask = case(seed, lengths)
    shaped = shaped_rewards(rewards, kl, mask, layout, 0.1)
    advantages, returns = gae(shaped, values, mask, layout, gamma=0.98, lam=0.9)
    start = 0
    for row, length in enumerate(lengths):
        chain = [i for i in range(start, start + length) if mask[i]]
        following, running = 0.0, 0.0
        for place in reversed(chain):
            reward = -0.1 * kl[place].item() + (rewards[row].item() if place == chain[-1] else 0)
            delta = reward + 0.98 * following - values[place].item()
            running = delta + 0.98 * 0.9 * running
            following = values[place].item()
            assert advantages[place].item() == pytest.approx(running, rel=1e-9, abs=1e-12)
            assert returns[place].item() == pytest.approx(running + following, rel=1e-9, abs=1e-12)
        start += length
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_gae_with_lambda_and_gamma_one_is_reward_minus_value():
    layout, rewards, _, values, mask = case(0, [4, 3])
    advantages, returns = gae(shaped_rewards(rewards, None, mask, layout, 0), values, mask, layout)
    per_token = broadcast(rewards, layout)
    torch.testing.assert_close(advantages[mask], (per_token - values)[mask])
    torch.testing.assert_close(returns[mask], per_token[mask])


def test_nothing_outside_the_mask_reaches_a_trained_token():
    layout, rewards, kl, values, mask = case(3, [5, 0, 6, 2])

    def everything(kl, values):
        shaped = shaped_rewards(rewards, kl, mask, layout, 0.2)
        return [
            reinforce_plus_plus(rewards, kl, mask, layout, kl_coef=0.2, gamma=0.9)[mask],
            kl_shaped(rewards, kl, mask, layout, kl_coef=0.2)[mask],
            *(x[mask] for x in gae(shaped, values, mask, layout, gamma=0.9, lam=0.8)),
            distill(values, kl, values, mask, 0.5)[mask],
            whiten(values, mask)[mask],
        ]

    clean = everything(kl, values)
    for poison in (math.nan, math.inf, -1e30):
        bad_kl, bad_values = kl.clone(), values.clone()
        bad_kl[~mask], bad_values[~mask] = poison, poison
        for ours, expected in zip(everything(bad_kl, bad_values), clean, strict=True):
            assert torch.equal(ours, expected)


def test_a_row_without_trained_tokens_gets_no_reward():
    layout = layout_of([2, 2])
    mask = torch.tensor([False, False, True, True])
    returns = reinforce_plus_plus(torch.tensor([5.0, 1.0]), None, mask, layout)
    assert returns.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_distillation_pulls_towards_the_teacher():
    mask = torch.tensor([True, True])
    student, teacher = torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0])
    assert distill(torch.zeros(2), student, teacher, mask, 0.5).tolist() == [-0.5, 0.5]


def test_whitening_gives_mean_zero_and_unbiased_variance_one():
    values = torch.tensor(np.random.default_rng(0).normal(3, 5, 50))
    mask = torch.arange(50) % 3 != 0
    white = whiten(values, mask)[mask]
    assert white.mean().item() == pytest.approx(0, abs=1e-12)
    assert white.var().item() == pytest.approx(1, rel=1e-8)
    shifted = whiten(values, mask, shift_mean=False)[mask]
    assert shifted.mean().item() == pytest.approx(values[mask].mean().item(), rel=1e-12)


def test_whitening_over_ranks_equals_whitening_at_once():
    values = torch.tensor(np.random.default_rng(1).normal(3, 5, 30))
    mask = torch.arange(30) % 4 != 0
    mask[20:] = False  # the last rank has nothing to train and must take part all the same
    expected = whiten(values, mask)
    barrier, seen, results = threading.Barrier(3, timeout=30), [None] * 3, [None] * 3

    def rank(number):
        def all_reduce(tensor):
            seen[number] = tensor
            barrier.wait()
            total = torch.stack(seen).sum(0)
            barrier.wait()
            return total

        part = slice(number * 10, number * 10 + 10)
        results[number] = whiten(values[part], mask[part], all_reduce)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    torch.testing.assert_close(torch.cat(results), expected, rtol=1e-12, atol=1e-12)


def test_whitening_nothing_is_an_error():
    with pytest.raises(DataError, match="no token of the batch is trained"):
        whiten(torch.ones(3), torch.zeros(3, dtype=torch.bool))
