"""Command line of the embedded engine, under SGLang's own flag names."""

from __future__ import annotations

import argparse
import secrets
from dataclasses import dataclass

DETERMINISTIC_SEED = 42


@dataclass(frozen=True)
class EngineOptions:
    """What one embedded engine was started with.

    Attributes:
        model_path: folder with config.json, safetensors and tokenizer.json.
        tokenizer_path: folder of the tokenizer; the model's folder when None.
        random_seed: base of the seeds of requests that bring none. Drawn at start when None, so
            that two engines do not give the same samples; fixed in deterministic mode.
        max_running_requests: rows that decode together; further requests wait.
        max_prefill_tokens: padded prompt tokens in one prefill, which bounds how long a wave of
            new prompts holds up the requests that already decode.
        context_length: prompt plus output, in tokens; the model's own limit when None.
        deterministic: a request's tokens and log-probs do not depend on what else runs.
        routes: requests may ask for the experts that each token went to.
        parent_pid: the engine ends when this process ends; 0 for nobody.
    """

    model_path: str
    tokenizer_path: str | None = None
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    random_seed: int = DETERMINISTIC_SEED
    max_running_requests: int = 256
    max_prefill_tokens: int = 1024
    context_length: int | None = None
    deterministic: bool = False
    routes: bool = False
    device: str = "cpu"
    dtype: str = "auto"
    weight_version: str = "default"
    parent_pid: int = 0
    log_level: str = "info"

    @property
    def name(self) -> str:
        return self.served_model_name or self.model_path


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser; every flag but --parent-pid is SGLang's."""
    parser = argparse.ArgumentParser(
        prog="python -m slime_core.engines.embedded",
        description="Serves a transformers model over SGLang's HTTP protocol.",
        allow_abbrev=False,
    )
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--tokenizer-path")
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_port, default=30000)
    parser.add_argument("--random-seed", type=int)
    parser.add_argument("--max-running-requests", type=_positive, default=256)
    parser.add_argument("--max-prefill-tokens", type=_positive, default=1024)
    parser.add_argument("--context-length", type=_positive)
    parser.add_argument("--enable-deterministic-inference", action="store_true")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--parent-pid", type=int, default=0, help="end when this process ends")
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error", "critical")
    )
    return parser


def parse_options(argv: list[str] | None = None) -> EngineOptions:
    """Parses a command line; argparse exits with one sentence on a bad flag or value."""
    parsed = build_parser().parse_args(argv)
    values = vars(parsed)
    values["deterministic"] = values.pop("enable_deterministic_inference")
    values["routes"] = values.pop("enable_return_routed_experts")
    if values["random_seed"] is None:
        values["random_seed"] = (
            DETERMINISTIC_SEED if values["deterministic"] else secrets.randbits(32)
        )
    return EngineOptions(**values)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must be from 1 to 65535, got {value}")
    return value
