"""Log-prob of the sampled token and entropy of its distribution, from logits.

Logits are divided by the rollout temperature, since the engine sampled from those. The work is
done in float32 (float64 stays float64) and the gradient is written out: autograd would keep
three to four copies of [P, V].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime_core.errors import ConfigError


def log_probs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution.

    z = logits / temperature, log_prob = z[target] - logsumexp(z), H = logsumexp(z) - sum p z.

    Args:
        logits: [P, V], any float type.
        targets: int64 [P]
        temperature: > 0.
        keep: bool [P, V], the recorded nucleus of a top-p rollout: the log-prob is renormalised
            over it, the target always belongs to it. The entropy stays that of the full
            distribution.

    Returns:
        log-probs [P] and entropy [P], float32 (float64 for float64 logits), both with gradient.

    Raises:
        ConfigError: temperature <= 0.
    """
    if not temperature > 0:
        raise ConfigError(f"the rollout temperature must be above 0, got {temperature}")
    if keep is None:
        return _LogProbEntropy.apply(logits, targets, temperature)  # type: ignore[return-value]
    _, entropy = _LogProbEntropy.apply(logits, targets, temperature)  # type: ignore[misc]
    inside = keep.scatter(1, targets[:, None], True)
    nucleus = logits.masked_fill(~inside, float("-inf"))
    return _LogProbEntropy.apply(nucleus, targets, temperature)[0], entropy  # type: ignore[index]


def chunked_log_probs(
    project: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
) -> tuple[Tensor, Tensor]:
    """The same from hidden states, with logits of one chunk alive at a time.

    Logits are computed again in the backward pass, so memory is that of [chunk_tokens, V]
    whatever P is. Give it trained positions only.

    Args:
        project: the output layer, [C, H] -> [C, V].
        hidden: [P, H], with gradient.
        targets: int64 [P]
        temperature: > 0.
        chunk_tokens: positions a chunk.

    Returns:
        log-probs [P] and entropy [P].
    """
    if chunk_tokens < 1:
        raise ConfigError(f"a chunk of log-probs needs at least 1 token, got {chunk_tokens}")

    def head(piece: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return log_probs_and_entropy(project(piece), target, temperature)

    if len(targets) == 0:
        return head(hidden, targets)
    log_probs, entropies = [], []
    for start in range(0, len(targets), chunk_tokens):
        piece = hidden[start : start + chunk_tokens]
        target = targets[start : start + chunk_tokens]
        if torch.is_grad_enabled():
            log_prob, entropy = checkpoint(head, piece, target, use_reentrant=False)  # type: ignore[misc]
        else:
            log_prob, entropy = head(piece, target)
        log_probs.append(log_prob)
        entropies.append(entropy)
    return torch.cat(log_probs), torch.cat(entropies)


class _LogProbEntropy(torch.autograd.Function):
    """d log_prob / dz = onehot - p; dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        scaled = _scaled(logits, temperature)
        lse = scaled.logsumexp(dim=-1)
        log_probs = scaled.gather(1, targets[:, None])[:, 0] - lse
        probs = (scaled - lse[:, None]).exp_()
        # An excluded token has probability 0 and logit -inf; its term is 0, not NaN.
        entropy = lse - (probs * scaled.masked_fill_(probs == 0, 0.0)).sum(-1)
        ctx.save_for_backward(logits, targets, lse, entropy)
        ctx.temperature = temperature
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, lse, entropy = ctx.saved_tensors
        grad_log_prob, grad_entropy = grads
        log_p = _scaled(logits, ctx.temperature).sub_(lse[:, None])
        probs = log_p.exp()
        # grad = g onehot - p (g + g_H (log p + H)), built in place.
        inner = log_p.masked_fill_(probs == 0, 0.0).add_(entropy[:, None])
        inner.mul_(grad_entropy[:, None]).add_(grad_log_prob[:, None])
        grad = inner.mul_(probs).neg_()
        grad.scatter_add_(1, targets[:, None], grad_log_prob[:, None])
        return grad.div_(ctx.temperature).to(logits.dtype), None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A fresh float32 (or float64) tensor of logits / temperature."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype, copy=True).div_(temperature)
