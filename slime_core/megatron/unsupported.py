"""Megatron options that would end in the middle of Megatron, with what each would need."""

from __future__ import annotations

from typing import Any

from slime_core.errors import ConfigError

_TE = "needs Transformer Engine, which is not used yet"
_OPTIMIZER = "needs Transformer Engine's Adam, which is not used yet; states are float32"
_HOST = "keeps optimizer state in the memory of the host, which is not there yet"
# Option -> (the value that changes nothing, why there is no other).
_ONLY: dict[str, tuple[Any, str]] = {
    "use_precision_aware_optimizer": (False, _OPTIMIZER),
    "main_grads_dtype": ("float32", _OPTIMIZER),
    "main_params_dtype": ("float32", _OPTIMIZER),
    "exp_avg_dtype": ("float32", _OPTIMIZER),
    "exp_avg_sq_dtype": ("float32", _OPTIMIZER),
    "optimizer_cpu_offload": (False, _HOST),
    "optimizer_offload_fraction": (0.0, _HOST),
    "use_torch_optimizer_for_cpu_offload": (False, _HOST),
    "overlap_cpu_optimizer_d2h_h2d": (False, _HOST),
    "cpu_offloading": (False, _TE),
    "cpu_offloading_num_layers": (0, _TE),
    "fine_grained_activation_offloading": (False, _TE),
}
_RECOMPUTED = ("core_attn", "mlp")


def refuse_unsupported(given: str, name: str, value: Any) -> None:
    """Refuses an option that cannot work.

    Args:
        given: as it was written.
        name: with underscores.

    Raises:
        ConfigError: says what it would need.
    """
    if name in _ONLY and value != _ONLY[name][0]:
        raise ConfigError(f"megatron option {given!r} {_ONLY[name][1]}: leave it out")
    if name == "recompute_modules" and isinstance(value, (list, tuple)):
        odd = [one for one in value if one not in _RECOMPUTED]
        if odd:
            raise ConfigError(
                f"megatron option {given!r}: {odd[0]!r} cannot be recomputed in this model; "
                f"choose from {', '.join(_RECOMPUTED)}, or recompute_granularity full"
            )
