"""The trainer's peak memory and the plan of `slime check`: `python -m benchmarks.trainer_memory`.

Each shape trains two iterations in a process of its own on the CPU. What counts is the peak of the
process above what it holds before the model is built (Python, torch, Megatron): the plan, too,
leaves out what libraries take for themselves. The plan is to be within 15 % of it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slime_core.batching.types import TrainBatch, offsets_of
from slime_core.check.memory import trainer_memory
from slime_core.megatron.settings import TrainerSettings
from slime_core.weights.tables import read_shape

ROW_TOKENS, PROMPT_TOKENS = 128, 16
BOUND = 0.15
RUN_TIMEOUT_S = 300


@dataclass(frozen=True)
class Shape:
    """A model and the tokens of a micro-batch."""

    hidden: int
    ffn: int
    layers: int
    vocab: int
    tokens: int
    dtype: str = "float32"
    tied: bool = True
    experts: int = 0
    megatron: dict[str, Any] = field(default_factory=dict)


RECOMPUTE = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
SHAPES = {
    "mixed": Shape(512, 1536, 8, 32_000, 1024),
    "many layers, many tokens": Shape(256, 768, 16, 8_000, 3072),
    "large vocabulary": Shape(768, 2048, 4, 50_000, 512, tied=False),
    "bf16": Shape(512, 1536, 8, 16_000, 1024, dtype="bfloat16"),
    "experts": Shape(512, 512, 6, 8_000, 1024, experts=8),
    "recomputed": Shape(256, 768, 16, 8_000, 3072, megatron=RECOMPUTE),
}


def main() -> int:
    """Prints a row a shape; 1 if a plan is further off than the bound."""
    worst = 0.0
    print(f"{'shape':<26} {'planned':>10} {'measured':>10}  off by")
    for name, shape in SHAPES.items():
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.trainer_memory", json.dumps(asdict(shape))],
            capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=True,
        )  # fmt: skip
        planned, measured = json.loads(done.stdout.splitlines()[-1])
        off = planned / measured - 1
        worst = max(worst, abs(off))
        mib = 2**20
        print(f"{name:<26} {planned / mib:7.0f} MiB {measured / mib:6.0f} MiB  {off:+.1%}")
    return int(worst > BOUND)


def measure(shape: Shape) -> tuple[int, int]:
    """(planned, measured) bytes of one shape."""
    with tempfile.TemporaryDirectory() as folder:
        _write_model(Path(folder), shape)
        settings = TrainerSettings(
            hf_checkpoint=folder,
            dtype=shape.dtype,  # type: ignore[arg-type]
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=shape.tokens,
            megatron=shape.megatron,
        )
        planned = trainer_memory(settings, read_shape(folder), shape.tokens).peak_bytes
        return planned, _peak(settings, shape)


def _peak(settings: TrainerSettings, shape: Shape) -> int:
    from slime_core.megatron import device
    from slime_core.megatron.rank import TrainerRank

    device.install("cpu")
    import slime_core.megatron.trainer  # noqa: F401  its libraries do not count

    batch = _batch(2 * shape.tokens // ROW_TOKENS, shape.vocab)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    rank = TrainerRank(settings)
    rank.setup()
    rank.set_state("s0")
    for number in range(2):
        rank.train(1, f"s{number}", f"s{number + 1}", "b", batch, number)
    return _status("VmHWM") - before


def _write_model(folder: Path, shape: Shape) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family, experts = "qwen3", {}
    if shape.experts:
        family, experts = "qwen3_moe", {"num_experts": shape.experts, "num_experts_per_tok": 2,
                                        "moe_intermediate_size": shape.ffn}  # fmt: skip
    config = AutoConfig.for_model(
        family, **experts, hidden_size=shape.hidden, intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers, num_attention_heads=shape.hidden // 64,
        num_key_value_heads=shape.hidden // 128, head_dim=64, vocab_size=shape.vocab,
        max_position_embeddings=4096, tie_word_embeddings=shape.tied,
    )  # fmt: skip
    with torch.device("cpu"):
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _batch(rows: int, vocab: int) -> TrainBatch:
    draw = np.random.default_rng(0)
    responses = np.full(rows, ROW_TOKENS - PROMPT_TOKENS, dtype=np.int64)
    lengths = responses + PROMPT_TOKENS
    rewards = np.where(np.arange(rows) % 2, 1.0, -1.0)
    return TrainBatch(
        tokens=draw.integers(4, vocab, lengths.sum()).astype(np.int32),
        token_offsets=offsets_of(lengths),
        response_lengths=responses,
        loss_mask=np.ones(responses.sum(), np.uint8),
        rollout_log_probs=np.full(responses.sum(), -5.0, np.float32),
        response_offsets=offsets_of(responses),
        rewards=rewards,
        raw_rewards=rewards,
        group_ids=np.arange(rows) // 2,
        rollout_ids=np.arange(rows),
        denominators=responses.astype(np.float64),
        steps=(tuple(range(rows)),),
        truncated=np.zeros(rows, np.uint8),
    )


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    match = re.search(rf"{name}:\s+(\d+) kB", text)
    assert match is not None
    return int(match[1]) * 1024


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(Shape(**json.loads(sys.argv[1])))))
    else:
        sys.exit(main())
