"""Trainer against plain transformers, tokens by core-second: `python -m benchmarks.trainer_speed`.

One optimizer step of GRPO on the same sequences, 30M parameters in float32 on one thread: by the
trainer (packed, log-probs on response tokens) and by a Hugging Face model with torch's AdamW
(right-padded micro-batches of rows of like length, logits of every token). Rounds alternate, and
CPU seconds of the process count, so a busy machine touches both alike.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slime_core.batching.types import TrainBatch, offsets_of
from slime_core.megatron.rank import TrainerRank
from slime_core.megatron.settings import TrainerSettings

VOCAB = 16_384
THREADS = 1
MOST_TOKENS = 2048


def write_model(folder: Path) -> int:
    """A random Qwen3 of about 30M parameters; returns their number."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=384,
        intermediate_size=1408,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def batch_of(rows: int, seed: int) -> TrainBatch:
    """Rows of 64 prompt tokens and 64 to 448 response tokens."""
    draw = np.random.default_rng(seed)
    responses = draw.integers(64, 449, rows)
    lengths = responses + 64
    rewards = np.where(np.arange(rows) % 2, 1.0, -1.0)
    return TrainBatch(
        tokens=draw.integers(4, VOCAB, lengths.sum()).astype(np.int32),
        token_offsets=offsets_of(lengths),
        response_lengths=responses,
        loss_mask=np.ones(responses.sum(), np.uint8),
        rollout_log_probs=np.full(responses.sum(), -10.0, np.float32),
        response_offsets=offsets_of(responses),
        rewards=rewards,
        raw_rewards=rewards,
        group_ids=np.arange(rows) // 4,
        rollout_ids=np.arange(rows),
        denominators=responses.astype(np.float64),
        steps=(tuple(range(rows)),),
        truncated=np.zeros(rows, np.uint8),
    )


def plain_step(folder: Path, batch: TrainBatch) -> Callable[[], None]:
    """The same step as a person would write it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    micro_batches = _padded(batch)

    def step() -> None:
        for ids, attention, mask, advantages in micro_batches:
            logits = model(ids, attention_mask=attention).logits[:, :-1].float()
            chosen = ids[:, 1:]
            log_p = logits.log_softmax(-1).gather(2, chosen[..., None])[..., 0]
            ratio = (log_p - log_p.detach()).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            per_row = (gain * mask).sum(1) / mask.sum(1)
            (-per_row.sum() / batch.num_rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _padded(batch: TrainBatch) -> list[tuple[Any, Any, Any, Any]]:
    """Right-padded micro-batches of at most MOST_TOKENS tokens, padding included."""
    import torch

    found, group = [], []
    for row in [*np.argsort(batch.lengths).tolist(), None]:
        full = row is not None and batch.lengths[row] * (len(group) + 1) > MOST_TOKENS
        if group and (row is None or full):
            width = int(batch.lengths[group].max())
            ids = torch.zeros(len(group), width, dtype=torch.int64)
            attention = torch.zeros(len(group), width, dtype=torch.int64)
            mask = torch.zeros(len(group), width - 1)
            for place, member in enumerate(group):
                tokens = batch.row_tokens(member)
                ids[place, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
                attention[place, : len(tokens)] = 1
                mask[place, batch.prompt_lengths[member] - 1 : len(tokens) - 1] = 1
            found.append((ids, attention, mask, torch.from_numpy(batch.rewards[group])[:, None]))
            group = []
        if row is not None:
            group.append(row)
    return found


def timed(step: Callable[[], Any]) -> float:
    """CPU seconds of this process."""
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = write_model(folder)
        batch = batch_of(options.rows, seed=0)
        rank = TrainerRank(
            TrainerSettings(
                hf_checkpoint=str(folder),
                lr=1e-5,
                threads=THREADS,
                use_dynamic_batch_size=True,
                max_tokens_per_gpu=MOST_TOKENS,
            )
        )
        rank.setup()
        rank.set_state("0")
        states = iter(range(1, 100))

        def ours() -> None:
            after = next(states)
            rank.train(1, str(after - 1), str(after), str(after), batch, seed=0)

        plain = plain_step(folder, batch)
        ours(), plain()
        seconds = [(timed(ours), timed(plain)) for _ in range(options.rounds)]
    tokens = int(batch.lengths.sum())
    speeds = [tokens / statistics.median(column) for column in zip(*seconds, strict=True)]
    print(f"{parameters / 1e6:.1f}M parameters, {tokens} tokens a step, {options.rounds} rounds")
    print(f"trainer      {speeds[0]:8.0f} tokens by core-second")
    print(f"transformers {speeds[1]:8.0f} tokens by core-second")
    print(f"ratio        {speeds[0] / speeds[1]:8.2f}")


if __name__ == "__main__":
    main()
