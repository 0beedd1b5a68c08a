"""Qwen3-0.6B's shape with random weights: seconds by stage beside the GPU's ceilings."""

from __future__ import annotations

import json
import random
import shutil
import string
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.host import keep, parser, show
from benchmarks.gpu.loop import clear, extremes, medians, run_loop
from slime_core.config.loading import load_config
from slime_core.engines.launcher import H200_OPTIONS

TOKENIZER = Path(__file__).parents[2] / "configs/quickstart/model"
REWARD = f"{Path(__file__).with_name('reward.py')}:odd_share"
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 28, 1024, 3072, 16, 8, 128, 151936
BODY_PARAMETERS = LAYERS * (HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * FFN)
BF16_BYTES = 2
WARM_UP = 1


def write_model(folder: Path, device: str, layers: int = LAYERS) -> None:
    """Random weights in Qwen3-0.6B's shape, with the quickstart's tokenizer: of 151936 ids it
    knows the first hundred, so prompts are made of those."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
        eos_token_id=VOCAB - 1,
    )
    save_random(Qwen3ForCausalLM, config, folder, device)


def save_random(kind: Any, config: Any, folder: Path, device: str) -> None:
    """Random bf16 weights of a class of transformers, with the quickstart's tokenizer."""
    import torch

    torch.manual_seed(0)
    with torch.device(device):
        model = kind(config).bfloat16()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TOKENIZER / name, folder / name)


def write_prompts(path: Path, rows: int, tokens: int) -> None:
    """Prompts of one token a character."""
    draw = random.Random(0)
    letters = string.digits + string.ascii_lowercase
    lines = [json.dumps({"input": "".join(draw.choices(letters, k=tokens))}) for _ in range(rows)]
    path.write_text("\n".join(lines) + "\n")


def tree(options: Any, folder: Path) -> dict[str, Any]:
    """The run's configuration."""
    sglang = {
        **H200_OPTIONS,
        "mem_fraction_static": 0.4,
        "cuda_graph_max_bs_decode": 512,
        "max_running_requests": 1024,
    }
    return {
        "run": {
            "run_name": "qwen3-shape",
            "num_rollout": options.iterations,
            "workspace": str(folder / "work"),
        },
        "data": {"prompt_data": str(folder / "prompts.jsonl")},
        "rollout": {
            "hf_checkpoint": str(folder / "model"),
            "rollout_batch_size": options.prompts,
            "n_samples_per_prompt": options.samples,
            "rollout_max_response_len": options.new_tokens,
            "sglang_server_concurrency": 1024,
        },
        "rewards": {"custom_rm_path": REWARD},
        "train": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 16384},
        "sync": {"update_weight_transport": options.transport},
        "cluster": {"device": options.device, "rollout_engine": options.engine},
        "fault_tolerance": {"engine_restarts": 0, "start_timeout_s": 400.0},
        "sglang": sglang if options.engine == "sglang" else {"max_running_requests": 1024},
    }


def floors(options: Any, ceilings: dict[str, float]) -> dict[str, float]:
    """Seconds that the arithmetic and the bytes of each stage take at the ceilings.

    generate: each decode step reads the weights once and the keys and values so far.
    train: 6 operations a parameter and token, the head on response tokens only, plus attention.
    sync: the weights are read and written twice, into the bucket and out of it.
    """
    rows = options.prompts * options.samples
    length = options.prompt_tokens + options.new_tokens
    weight_bytes = (BODY_PARAMETERS + VOCAB * HIDDEN) * BF16_BYTES
    kv_bytes = rows * LAYERS * 2 * KV_HEADS * HEAD_DIM * BF16_BYTES
    mean_context = options.prompt_tokens + options.new_tokens / 2
    decode = options.new_tokens * (weight_bytes + kv_bytes * mean_context)
    body = 6 * BODY_PARAMETERS * rows * length
    head = 6 * VOCAB * HIDDEN * rows * options.new_tokens
    attention = 3.5 * 4 * LAYERS * HEADS * HEAD_DIM * rows * length**2 / 2
    copy, gemm = ceilings["copy_tbps"] * 1e12, ceilings["gemm_tflops"] * 1e12
    return {
        "generate": decode / copy,
        "train": (body + head + attention) / gemm,
        "sync": 4 * weight_bytes / copy,
    }


def rows_of(options: Any, result: dict[str, Any], floor: dict[str, float]) -> list[tuple[str, Any]]:
    """The printed table."""
    seconds = medians(result, "seconds", WARM_UP)
    metrics = medians(result, "metrics", WARM_UP)
    rows_count = options.prompts * options.samples
    tokens = metrics["rollout/response_tokens"]
    rows: list[tuple[str, Any]] = [
        ("engine", result["engine"]),
        ("start to ready", f"{result['ready_s']:.1f} s"),
        (
            "iteration",
            f"{options.prompts} prompts x {options.samples} samples, "
            f"{options.prompt_tokens} + {tokens / rows_count:.0f} tokens",
        ),
    ]
    for stage, value in seconds.items():
        beside = f", floor {floor[stage]:.3f} s" if stage in floor else ""
        rows.append((f"median of {stage}", f"{value:.3f} s{beside}"))
    rows.append(("generated", f"{tokens / seconds['generate']:.0f} tokens/s"))
    step = metrics["perf/actor_train_time"]
    trained = tokens + rows_count * options.prompt_tokens
    rows.append(("optimizer step", f"{step:.3f} s = {trained / step:.0f} tokens/s"))
    for metric in ("sync/canary_abs_diff", "train/train_rollout_logprob_abs_diff"):
        middle, most = extremes(result, metric)
        rows.append((f"{metric}, median / largest", f"{middle:.2e} / {most:.2e}"))
    rows.append(("GPU memory in use", f"{max(r['used_mib'] for r in result['iterations'])} MiB"))
    return rows


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--engine", choices=("embedded", "sglang"), default="sglang")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--transport", choices=("tensor", "disk"), default="tensor")
    made.add_argument("--iterations", type=int, default=3)
    made.add_argument("--prompts", type=int, default=64)
    made.add_argument("--samples", type=int, default=8)
    made.add_argument("--prompt-tokens", type=int, default=128)
    made.add_argument("--new-tokens", type=int, default=256)
    made.add_argument("--layers", type=int, default=LAYERS, help="fewer make a rehearsal")
    options = made.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="slime-gpu-"))
    ceilings = json.loads((options.out / "ceilings.json").read_text())
    try:
        write_model(folder / "model", options.device, options.layers)
        write_prompts(folder / "prompts.jsonl", options.prompts * options.iterations,
                      options.prompt_tokens)  # fmt: skip
        result = run_loop(load_config(tree(options, folder), {}))
    finally:
        clear(folder)
    floor = floors(options, ceilings)
    shape = {name: value for name, value in vars(options).items() if name != "out"}
    keep(options.out, f"qwen3-{options.engine}", {**result, "floors": floor, "shape": shape})
    if len(result["iterations"]) > WARM_UP:
        show(rows_of(options, result, floor))
    return 1 if result["error"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
