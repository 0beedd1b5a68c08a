"""Routes of the engine (`--use-rollout-routing-replay`): how far apart log-probs of trainer and
engine are in a small model with experts, without and with them.

A rehearsal without a GPU: --engine embedded --device cpu --layers 2 --hidden 64 --prompts 2
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.host import keep, parser, show
from benchmarks.gpu.loop import clear, extremes, medians, run_loop
from benchmarks.gpu.qwen3_06b import VOCAB, save_random, tree, write_prompts
from slime_core.config.loading import load_config

EXPERTS, PER_TOKEN = 32, 4
VARIANTS = {"the trainer's own routes": False, "the engine's routes": True}
SHOWN = (
    "train/engine_routes",
    "train/train_rollout_logprob_abs_diff",
    "train/train_rollout_logprob_abs_diff_max",
    "sync/canary_abs_diff",
)


def write_model(folder: Path, layers: int, hidden: int, device: str) -> None:
    """Random weights of a Qwen3 with experts; its routers are undecided, as arithmetic goes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
        eos_token_id=VOCAB - 1,
    )
    save_random(Qwen3MoeForCausalLM, config, folder, device)


def rows_of(name: str, result: dict[str, Any]) -> list[tuple[str, Any]]:
    """The printed rows of one variant."""
    rows: list[tuple[str, Any]] = [
        (f"{name}: iterations", len(result["iterations"])),
        (f"{name}: error", result["error"] or "none"),
    ]
    for metric in SHOWN:
        if any(metric in one["metrics"] for one in result["iterations"]):
            middle, most = extremes(result, metric)
            rows.append((f"{name}: {metric}, median / largest", f"{middle:.2e} / {most:.2e}"))
    seconds = medians(result, "seconds", 1) if len(result["iterations"]) > 1 else {}
    rows.append((f"{name}: seconds", ", ".join(f"{k} {v:.3f}" for k, v in seconds.items())))
    return rows


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--engine", choices=("embedded", "sglang"), default="sglang")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--transport", choices=("tensor", "disk"), default="tensor")
    made.add_argument("--iterations", type=int, default=4)
    made.add_argument("--prompts", type=int, default=32)
    made.add_argument("--samples", type=int, default=8)
    made.add_argument("--prompt-tokens", type=int, default=64)
    made.add_argument("--new-tokens", type=int, default=128)
    made.add_argument("--layers", type=int, default=12)
    made.add_argument("--hidden", type=int, default=1024)
    options = made.parse_args()
    found: dict[str, Any] = {}
    for name, replay in VARIANTS.items():
        folder = Path(tempfile.mkdtemp(prefix="slime-gpu-"))
        try:
            write_model(folder / "model", options.layers, options.hidden, options.device)
            write_prompts(folder / "prompts.jsonl", options.prompts * options.iterations,
                          options.prompt_tokens)  # fmt: skip
            wanted = tree(options, folder) | {"algorithm": {"use_rollout_routing_replay": replay}}
            found[name] = run_loop(load_config(wanted, {"canary_tolerance": 1.0}))
        finally:
            clear(folder)
    keep(options.out, f"routes-{options.engine}", found)
    show([row for name, result in found.items() for row in rows_of(name, result)])
    return int(any(result["error"] for result in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
