"""Values of Megatron's options that the trainer would end of, told before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime_core.errors import ConfigError

AT_LEAST_ONE = frozenset(
    {
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "make_vocab_size_divisible_by",
        "lr_decay_iters",
        "lr_wsd_decay_iters",
        "recompute_num_layers",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
    }
)
AT_LEAST_ZERO = frozenset({"lr_warmup_iters", "lr_warmup_init", "min_lr", "weight_decay"})
BELOW_ONE = frozenset({"adam_beta1", "adam_beta2"})


def check_bounds(given: str, name: str, value: Any) -> None:
    """Refuses a number that the option cannot have.

    Args:
        given, name: the option as it was written, and with underscores.
        value: of the option's type already.

    Raises:
        ConfigError: names the option, the bound and the value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    bounds = {
        "at least 1": name not in AT_LEAST_ONE or value >= 1,
        "at least 0": name not in AT_LEAST_ZERO or value >= 0,
        "from 0 to below 1": name not in BELOW_ONE or 0 <= value < 1,
        "above 0": name != "adam_eps" or value > 0,
        "above 0 and at most 1": name != "optimizer_offload_fraction" or 0 < value <= 1,
    }
    for words, holds in bounds.items():
        if not holds:
            raise ConfigError(f"megatron option {given!r} must be {words}, not {value!r}")


def check_recompute(transformer: Mapping[str, Any]) -> None:
    """Refuses a recomputation that lacks a part, or has one too many.

    Args:
        transformer: options of TransformerConfig.

    Raises:
        ConfigError: names what is missing, or has no meaning.
    """
    granularity = transformer.get("recompute_granularity")
    parts = ("recompute_method", "recompute_num_layers")
    given = [name for name in parts if transformer.get(name) is not None]
    if granularity == "full" and len(given) < len(parts):
        missing = " and ".join(name for name in parts if name not in given)
        raise ConfigError(
            f"recompute_granularity full needs {missing}, such as recompute_method uniform and "
            "recompute_num_layers 1"
        )
    if granularity != "full" and given:
        raise ConfigError(
            f"recompute_granularity is {granularity}, but only full takes {' and '.join(given)}: "
            "set it to full, or leave that out"
        )
