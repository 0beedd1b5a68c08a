"""Drawing tokens: one uniform number per (seed, position), so neighbours cannot matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slime_core.engines.embedded.request import LogProbAsk, Request, TopList

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Draw:
    """One new token per request.

    Attributes:
        tokens: [requests].
        log_probs: [requests]; NaN where the logits were not finite.
        full: log-probs over the vocabulary, [requests, vocab], float32.
    """

    tokens: list[int]
    log_probs: list[float]
    full: torch.Tensor


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) from counters (splitmix64 over seed and position).

    Args:
        seeds: uint64 [n].
        positions: uint64 [n], the position of the drawn token in its sequence.

    Returns:
        float64 [n], multiples of 2^-53.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


def draw(logits: torch.Tensor, requests: Sequence[Request], end_ids: frozenset[int]) -> Draw:
    """Draws the next token of each request.

    Log-probs are those of softmax(logits / temperature), before top-k, top-p and min-p, as SGLang
    0.5 returns them; a greedy request counts as temperature 1.

    Args:
        logits: float32 [requests, vocab]; changed in place.
        requests: one per row.
        end_ids: the model's own end tokens, banned below min_new_tokens.
    """
    _ban_ends(logits, requests, end_ids)
    heats = [1.0 if request.params.greedy else request.params.temperature for request in requests]
    if any(heat != 1.0 for heat in heats):
        logits /= torch.tensor(heats, dtype=logits.dtype, device=logits.device)[:, None]
    full = torch.log_softmax(logits, dim=-1)
    greedy = [request.params.greedy for request in requests]
    if all(greedy):
        tokens = full.argmax(dim=-1)
    else:
        tokens = _sample(full, requests)
        if any(greedy):
            flags = torch.tensor(greedy, device=logits.device)
            tokens = torch.where(flags, full.argmax(dim=-1), tokens)
    chosen = full.gather(-1, tokens[:, None])[:, 0]
    return Draw(tokens.tolist(), chosen.tolist(), full)


def _ban_ends(logits: torch.Tensor, requests: Sequence[Request], end_ids: frozenset[int]) -> None:
    vocab = logits.shape[-1]
    for row, request in enumerate(requests):
        if len(request.output) < request.params.min_new_tokens:
            banned = [i for i in end_ids | request.params.stop_token_ids if 0 <= i < vocab]
            logits[row, banned] = float("-inf")


def _sample(full: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Inverse of the cumulative distribution, [requests, vocab] -> [requests]."""
    probs = full.exp()
    if any(request.params.filters for request in requests):
        probs = _filter(probs, requests)
    seeds = np.array([request.seed for request in requests], dtype=np.uint64)
    positions = np.array([request.length for request in requests], dtype=np.uint64)
    chance = torch.from_numpy(uniforms(seeds, positions)).to(full.device)[:, None]
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Strictly below the total, so that the first larger entry exists and has mass of its own.
    goal = torch.minimum(chance * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, goal, right=True)[:, 0]
    return tokens.clamp_(max=full.shape[-1] - 1)


def _filter(probs: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Zeroes what top-k, top-p and min-p cut away, in that order; [requests, vocab]."""
    vocab, device = probs.shape[-1], probs.device
    params = [request.params for request in requests]
    keep = torch.tensor([p.top_k if p.top_k > 0 else vocab for p in params], device=device)
    mass = torch.tensor([p.top_p if p.top_p < 1 else torch.inf for p in params], device=device)
    share = torch.tensor([p.min_p for p in params], device=device)
    ranked, index = probs.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
    cut = torch.arange(vocab, device=device)[None] >= keep[:, None]
    cut |= before > mass[:, None]
    cut |= ranked < ranked[:, :1] * share[:, None]
    return torch.zeros_like(probs).scatter_(-1, index, ranked.masked_fill(cut, 0.0))


def alternatives(full: torch.Tensor, ask: LogProbAsk) -> tuple[list[TopList], list[list[float]]]:
    """The extra log-probs that a request asked for.

    Args:
        full: log-probs [positions, vocab].

    Returns:
        Per position the `top` most probable (log-prob, token), and the log-probs of `token_ids`;
        empty lists for what was not asked.
    """
    tops: list[TopList] = []
    chosen: list[list[float]] = []
    if ask.top:
        values, tokens = full.topk(min(ask.top, full.shape[-1]), dim=-1)
        rows = zip(values.tolist(), tokens.tolist(), strict=True)
        tops = [list(zip(row, ids, strict=True)) for row, ids in rows]
    if ask.token_ids:
        index = torch.tensor(ask.token_ids, device=full.device)
        chosen = full[:, index].tolist()
    return tops, chosen
