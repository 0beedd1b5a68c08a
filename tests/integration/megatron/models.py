"""Small random Hugging Face models and batches, and plain torch references for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slime_core.batching.types import TrainBatch, offsets_of

VOCAB = 150


def save_random_model(folder: Path, family: str, tied: bool, **changes: object) -> str:
    """A random model with weights large enough for its logits to tell tokens apart."""
    torch.manual_seed(0)
    sizes: dict[str, object] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
    }
    if family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        sizes |= experts | {"norm_topk_prob": True}
    config = AutoConfig.for_model(family, **(sizes | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    model.save_pretrained(folder)
    return str(folder)


def load_model(folder: str) -> torch.nn.Module:
    # Products of all experts at once know no float64.
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def sequences(vocab: int, lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, n).tolist() for n in lengths]


def random_batch(
    vocab: int,
    rows: int = 24,
    steps: int = 1,
    seed: int = 0,
    reward_scale: float = 1.0,
    multiple: int = 1,
) -> TrainBatch:
    """Ragged rows, some response tokens masked, two rows of one rollout, one row without any
    trained token. Lengths are multiples of `multiple`."""
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(1, 9, rows), rng.integers(1, 14, rows)
    prompts += -(prompts + responses) % multiple
    lengths = prompts + responses
    response_offsets = offsets_of(responses)
    mask = (rng.random(responses.sum()) < 0.8).astype(np.uint8)
    mask[response_offsets[3] : response_offsets[4]] = 0
    sums = np.add.reduceat(mask.astype(np.int64), response_offsets[:-1]).astype(np.float64)
    rollout_ids = np.arange(rows)
    rollout_ids[1] = 0
    denominators = sums.copy()
    denominators[:2] = sums[:2].sum()
    parts = np.array_split(np.arange(rows), steps)
    rewards = rng.standard_normal(rows) * reward_scale
    return TrainBatch(
        tokens=rng.integers(3, vocab, lengths.sum()).astype(np.int32),
        token_offsets=offsets_of(lengths),
        response_lengths=responses.astype(np.int64),
        loss_mask=mask,
        rollout_log_probs=rng.normal(-3, 1, responses.sum()).astype(np.float32),
        response_offsets=response_offsets,
        rewards=rewards,
        raw_rewards=(rewards > 0).astype(np.float64),
        group_ids=np.arange(rows) // 4,
        rollout_ids=rollout_ids,
        denominators=denominators,
        steps=tuple(tuple(part.tolist()) for part in parts),
        truncated=np.zeros(rows, np.uint8),
    )


def trained_rollouts(batch: TrainBatch) -> int:
    """Rollouts with at least one trained token."""
    return len(set(batch.rollout_ids[batch.denominators > 0].tolist()))


@dataclass(frozen=True)
class Reference:
    """What plain torch makes of one step: the loss, the mean entropy, the gradient norm, and the
    weights after one AdamW step."""

    loss: float
    entropy: float
    grad_norm: float
    weights: dict[str, torch.Tensor]


def reference_step(
    folder: str,
    batch: TrainBatch,
    *,
    temperature: float,
    lr: float,
    per_token: bool,
    entropy_coef: float,
    clip_grad: float,
    balance: float = 0.0,
) -> Reference:
    """One on-policy step on the Hugging Face model, one sequence at a time, in float64.

    On policy the ratio is 1, so the policy gradient is that of -A log p. `balance` weighs what
    experts lose by getting unequal shares of all tokens; it is not part of the reported loss.
    """
    model = load_model(folder).double()
    rollouts, tokens = len(set(batch.rollout_ids.tolist())), int(batch.loss_mask.sum())
    trained = trained_rollouts(batch)
    losses, entropies = [], []
    routed = _router_logits(model)
    for row in range(batch.num_rows):
        ids = torch.from_numpy(batch.row_tokens(row).astype(np.int64))
        where = batch.row_response(row)
        count = int(batch.response_lengths[row])
        logits = model(ids[None]).logits[0, -count - 1 : -1] / temperature
        log_p = logits.log_softmax(-1)
        chosen = log_p.gather(1, ids[-count:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        keep = torch.from_numpy(batch.loss_mask[where]).bool()
        weight = 1 / tokens if per_token else 1 / max(batch.denominators[row], 1) / rollouts
        ratio = (chosen - chosen.detach()).exp()
        losses.append((-ratio * batch.rewards[row])[keep].sum() * weight)
        entropies.append(entropy[keep].sum() * weight)
    mean_entropy = torch.stack(entropies).sum()
    loss = torch.stack(losses).sum() - entropy_coef * mean_entropy
    unequal = [_unequal_shares(torch.cat(rows), model.config) for rows in routed.values()]  # type: ignore[arg-type]
    (loss + balance * sum(unequal)).backward()
    parameters = dict(model.named_parameters())
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), clip_grad)
    torch.optim.AdamW(parameters.values(), lr=lr, betas=(0.9, 0.999), weight_decay=0.0).step()
    share = 1.0 if per_token else rollouts / trained  # a metric leaves untrained rollouts out
    return Reference(
        loss=loss.item(),
        entropy=mean_entropy.item() * share,
        grad_norm=norm.item(),
        weights={name: value.detach().float() for name, value in parameters.items()},
    )


def _router_logits(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """Fills itself with the logits of each router as the model runs."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            rows = found.setdefault(name, [])
            module.register_forward_hook(lambda _, __, out, rows=rows: rows.append(out[0]))
    return found


def _unequal_shares(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """Experts x the sum over them of (share of choices) x (mean probability); 1 at equal shares."""
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(config.num_experts_per_tok, -1).indices
    shares = torch.bincount(chosen.flatten(), minlength=logits.size(-1)) / chosen.numel()
    return logits.size(-1) * (shares * probabilities.mean(0)).sum()


def token_log_probs(model: torch.nn.Module, batch: TrainBatch, row: int) -> torch.Tensor:
    """Log-probs of one row's response tokens under a Hugging Face model, [R]."""
    ids = torch.from_numpy(batch.row_tokens(row).astype(np.int64))
    count = int(batch.response_lengths[row])
    log_p = model(ids[None]).logits[0, -count - 1 : -1].log_softmax(-1)
    return log_p.gather(1, ids[-count:, None])[:, 0]
