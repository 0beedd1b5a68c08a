"""Draws: counter-based numbers, the distribution, filters, and independence of neighbours."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.engines.embedded.request import LogProbAsk, Request
from slime_core.engines.embedded.sampler import alternatives, draw, uniforms
from slime_core.engines.embedded.sampling_params import SamplingParams

NO_ENDS: frozenset[int] = frozenset()


def request(seed: int = 0, position: int = 3, **params) -> Request:
    return Request("r", [1] * position, SamplingParams(**params), seed, 8)


def test_uniforms_are_splitmix64():
    """Seed 0 mixes to 0xE220A8397B1DCDAF: the first output of the published generator."""
    value = np.uint64(0xE220A8397B1DCDAF)
    state = (int(value) + 0x9E3779B97F4A7C15) % 2**64
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    expected = (z >> 11) * 2.0**-53
    assert uniforms(np.array([0], np.uint64), np.array([0], np.uint64))[0] == expected


def test_uniforms_are_flat_and_distinct():
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64))
    values = uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(values)) == values.size
    assert ((values >= 0) & (values < 1)).all()
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    chi_squared = ((counts - 2000) ** 2 / 2000).sum()
    assert chi_squared < 43.8  # 99.9 % of 19 degrees of freedom
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


def test_frequencies_follow_the_distribution():
    probs = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025])
    rows = 20000
    logits = probs.log().repeat(rows, 1)
    drawn = draw(logits, [request(seed) for seed in range(rows)], NO_ENDS)
    counts = np.bincount(drawn.tokens, minlength=5)
    expected = probs.numpy() * rows
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # 99.9 % of 4 degrees of freedom


def test_log_probs_are_those_after_temperature():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    drawn = draw(logits.clone(), [request(temperature=0.5)], NO_ENDS)
    expected = torch.log_softmax(logits / 0.5, -1)[0, drawn.tokens[0]].item()
    assert drawn.log_probs[0] == pytest.approx(expected, abs=1e-6)


def test_greedy_takes_the_best_and_reports_it_at_temperature_one():
    logits = torch.tensor([[1.0, 5.0, 3.0]])
    drawn = draw(logits.clone(), [request(temperature=0.0)], NO_ENDS)
    assert drawn.tokens == [1]
    assert drawn.log_probs[0] == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item(), abs=1e-6)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 3, "top_p": 0.76}, {0, 1, 2}),
    ],
)
def test_filters_cut_and_leave_log_probs_alone(params, allowed):
    probs = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025])
    rows = 400
    logits = probs.log().repeat(rows, 1)
    drawn = draw(logits, [request(seed, **params) for seed in range(rows)], NO_ENDS)
    assert set(drawn.tokens) == allowed
    for token, log_prob in zip(drawn.tokens, drawn.log_probs, strict=True):
        assert log_prob == pytest.approx(math.log(probs[token]), abs=1e-5)


def test_a_token_without_mass_is_never_drawn():
    logits = torch.full((2000, 4), float("-inf"))
    logits[:, 2] = 0.0
    drawn = draw(logits, [request(seed) for seed in range(2000)], NO_ENDS)
    assert set(drawn.tokens) == {2}


def test_ends_are_banned_below_min_new_tokens():
    logits = torch.tensor([[0.0, 9.0, 8.0, 1.0]])
    params = {"temperature": 0.0, "min_new_tokens": 2, "stop_token_ids": frozenset({2})}
    asked = request(**params)
    assert draw(logits.clone(), [asked], frozenset({1})).tokens == [3]
    asked.output = [3, 3]
    assert draw(logits.clone(), [asked], frozenset({1})).tokens == [1]


def test_broken_logits_show_as_nan():
    drawn = draw(torch.full((1, 4), float("nan")), [request()], NO_ENDS)
    assert math.isnan(drawn.log_probs[0])
    assert 0 <= drawn.tokens[0] < 4


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**64 - 1), st.integers(0, 500), st.integers(1, 30), st.data())
def test_a_draw_does_not_depend_on_its_neighbours(seed, position, rows, data):
    torch.manual_seed(position)
    row = torch.randn(1, 50)
    mine = request(seed, position, temperature=0.7, top_p=0.9)
    alone = draw(row.clone(), [mine], NO_ENDS)
    place = data.draw(st.integers(0, rows))
    others = [request(i, top_k=1 + i % 5, temperature=1.0 + i) for i in range(rows)]
    logits = torch.cat([torch.randn(place, 50), row, torch.randn(rows - place, 50)])
    among = draw(logits, [*others[:place], mine, *others[place:]], NO_ENDS)
    assert among.tokens[place] == alone.tokens[0]
    assert among.log_probs[place] == alone.log_probs[0]


def test_the_same_seed_draws_anew_at_each_position():
    logits = torch.zeros(200, 1000)
    drawn = draw(logits, [request(7, position) for position in range(200)], NO_ENDS)
    assert len(set(drawn.tokens)) > 150


def test_alternatives():
    full = torch.log(torch.tensor([[0.1, 0.7, 0.2]]))
    tops, chosen = alternatives(full, LogProbAsk(True, top=2, token_ids=(0, 2)))
    assert [token for _, token in tops[0]] == [1, 2]
    assert chosen[0] == pytest.approx([math.log(0.1), math.log(0.2)])
    assert alternatives(full, LogProbAsk(True)) == ([], [])
