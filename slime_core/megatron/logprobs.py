"""Log-probs and entropy of chosen tokens, over a vocabulary that may be cut across ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from slime_core.algorithms.log_probs import chunked_log_probs, log_probs_and_entropy
from slime_core.megatron import parallel
from slime_core.megatron.model import PolicyModel


def log_probs_of_rows(
    model: PolicyModel,
    rows: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocab_size: int,
    temperature: float,
    chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of targets and entropies, at most `chunk_tokens` rows of logits at a time.

    With several chunks the logits are computed again in the backward pass instead of kept.

    Args:
        model: the last pipeline stage.
        rows: [n, hidden], final hidden states that predict the targets.
        targets: int64 [n]
        vocab_size: columns that count; padding columns do not take part.
        temperature: divides the logits.
        chunk_tokens: rows at a time.

    Returns:
        float32 [n] log-probs, float32 [n] entropies in nats.
    """
    whole = rows.size(0) <= chunk_tokens
    if parallel.tensor_group().size() == 1:

        def project(part: torch.Tensor) -> torch.Tensor:
            return model.head(part)[:, :vocab_size]

        if whole:
            return log_probs_and_entropy(project(rows), targets, temperature)
        return chunked_log_probs(project, rows, targets, temperature, chunk_tokens)

    def one(part: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _parallel_log_probs(model.head(part), wanted, vocab_size, temperature)

    if whole:
        return one(rows, targets)
    pieces = [
        checkpoint(one, part, wanted, use_reentrant=False)
        for part, wanted in zip(rows.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    return torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces])


def _parallel_log_probs(
    logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    group = parallel.tensor_group()
    first = group.rank() * logits.size(-1)
    scaled = _real_columns(logits, vocab_size - first).float() / temperature
    return VocabParallelLogProbs.apply(scaled, targets, first, group)  # type: ignore[return-value]


def _real_columns(logits: torch.Tensor, real: int) -> torch.Tensor:
    """Cuts padding columns off; a rank that holds only padding keeps one with no weight."""
    if real > 0:
        return logits[:, :real]
    return logits[:, :1] * 0.0 + torch.finfo(logits.dtype).min


class VocabParallelLogProbs(torch.autograd.Function):
    """log p(target) and entropy of softmax(logits), each rank holding some columns.

    Keeps one float32 copy of the local logits for the backward pass and nothing of the whole
    vocabulary. d log p_t / dx = 1[t] - p;  dH / dx = p (E_p[x] - x).
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, first: int, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [n, local columns], int64 [n], first local column -> two float32 [n]."""
        top = _reduce(logits.amax(-1), dist.ReduceOp.MAX, group)
        weights = (logits - top[:, None]).exp_()  # [n, columns]
        total = _reduce(weights.sum(-1), dist.ReduceOp.SUM, group)
        mean = _reduce((weights * logits).sum(-1), dist.ReduceOp.SUM, group) / total
        log_total = top + total.log()  # [n], log-sum-exp
        local = targets - first
        mine = (local >= 0) & (local < logits.size(-1))
        place = torch.where(mine, local, 0)
        own = logits.gather(-1, place[:, None]).squeeze(-1)
        target = _reduce(torch.where(mine, own, 0.0), dist.ReduceOp.SUM, group)
        ctx.save_for_backward(logits, log_total, mean, place, mine)
        ctx.set_materialize_grads(False)
        return target - log_total, log_total - mean

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Gradient of the local logits."""
        logits, log_total, mean, place, mine = ctx.saved_tensors
        grad_log_prob, grad_entropy = grads
        probs = (logits - log_total[:, None]).exp_()
        grad = torch.zeros_like(logits)
        if grad_log_prob is not None:
            grad = grad - probs * grad_log_prob[:, None]
            hit = torch.where(mine, grad_log_prob, 0.0)
            grad.scatter_add_(-1, place[:, None], hit[:, None])
        if grad_entropy is not None:
            grad = grad + probs * (mean[:, None] - logits) * grad_entropy[:, None]
        return grad, None, None, None


def _reduce(values: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=op, group=group)
    return values
