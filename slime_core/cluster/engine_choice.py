"""Which generation server a run uses, and what it is started with besides the user's options."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError

EngineKind = Literal["embedded", "sglang"]

MEMORY_SHARE = 0.4
"""SGLang by itself takes most of a GPU; beside a trainer it must leave room."""


def resolve_engine(config: RunConfig, device: Literal["cpu", "cuda"]) -> EngineKind:
    """The kind of generation server; auto takes SGLang on CUDA where it is installed.

    Raises:
        ConfigError: sglang was asked for and its package is missing.
    """
    asked = config.cluster.rollout_engine
    if asked == "embedded" or (asked == "auto" and device == "cpu"):
        return "embedded"
    if importlib.util.find_spec("sglang") is not None:
        return "sglang"
    if asked == "sglang":
        raise ConfigError(
            "rollout_engine sglang: the package is not installed; install the extra "
            "slime-flow[sglang], or use --rollout-engine embedded"
        )
    return "embedded"


def engine_options(
    config: RunConfig, kind: EngineKind, device: Literal["cpu", "cuda"], dtype: str
) -> dict[str, Any]:
    """Options of one server; the user's own come last and win.

    Args:
        dtype: "float32" or "bfloat16", the trainer's.
    """
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    if kind == "sglang":
        options["mem_fraction_static"] = MEMORY_SHARE
        if device == "cuda" and dtype == "float32":
            # Its usual RMSNorm kernel takes half precision only (0.5.17); this mode has another.
            options["enable_deterministic_inference"] = True
    if config.algorithm.use_rollout_routing_replay:
        options["enable_return_routed_experts"] = True
    return options | config.sglang
