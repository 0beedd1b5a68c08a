"""Megatron options that would end in the middle of Megatron, with what each would need."""

from __future__ import annotations

from typing import Any

from slime_core.errors import ConfigError

_TE = "needs Transformer Engine, which is not used yet"
_OPTIMIZER = "needs Transformer Engine's Adam, which is not used yet; states are float32"
_HOST = "belongs to Megatron's own offload; here the device updates states that the host keeps"
_DROPS = "drops tokens or weights them otherwise than the model's own code does"
_ROUTES = "routes tokens otherwise than the model's own code does"
# Option -> (the value that changes nothing, why there is no other).
_ONLY: dict[str, tuple[Any, str]] = {
    "main_grads_dtype": ("float32", _OPTIMIZER),
    "main_params_dtype": ("float32", _OPTIMIZER),
    "exp_avg_dtype": ("float32", _OPTIMIZER),
    "exp_avg_sq_dtype": ("float32", _OPTIMIZER),
    "use_torch_optimizer_for_cpu_offload": (False, _HOST),
    "pin_cpu_grads": (True, _HOST),
    "pin_cpu_params": (True, _HOST),
    "optimizer_cuda_graph": (False, "records steps of Megatron's own loop, which is another one"),
    "overlap_p2p_comm_warmup_flush": (False, "has not been tried in interleaved pipelines"),
    "microbatch_group_size_per_vp_stage": (None, "is always the number of pipeline stages"),
    "cpu_offloading": (False, _TE),
    "cpu_offloading_num_layers": (0, _TE),
    "fine_grained_activation_offloading": (False, _TE),
    "moe_enable_deepep": (False, "needs DeepEP, which is not used yet"),
    "moe_latent_size": (None, _TE),
    "moe_shared_expert_gate": (False, "belongs to shared experts, which are not there yet"),
    "overlap_moe_expert_parallel_comm": (False, _TE),
    "moe_expert_capacity_factor": (None, _DROPS),
    "moe_pad_expert_input_to_capacity": (False, _DROPS),
    "moe_token_dropping": (False, _DROPS),
    "moe_apply_probs_on_input": (False, _DROPS),
    "moe_router_topk_scaling_factor": (None, _DROPS),
    "moe_router_num_groups": (None, _ROUTES),
    "moe_router_group_topk": (None, _ROUTES),
    "moe_router_topk_limited_devices": (None, _ROUTES),
    "moe_router_force_load_balancing": (False, _ROUTES),
    "moe_input_jitter_eps": (None, _ROUTES),
    "moe_enable_routing_replay": (
        False,
        "is Megatron's own replay of routes; use_routing_replay is the trainer's",
    ),
}
# Option -> values that work.
_AMONG = {
    "recompute_modules": ("core_attn", "mlp", "moe"),
    "moe_token_dispatcher_type": ("alltoall", "allgather"),
    "moe_router_load_balancing_type": ("none", "aux_loss"),
}


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
    if name == "moe_layer_freq" and any(
        one != 1 for one in (value if isinstance(value, list) else [value])
    ):
        raise ConfigError(
            f"megatron option {given!r} is {value!r}, but in the models that can be trained all "
            "layers have experts: leave it out"
        )
    if name in _AMONG:
        values = value if isinstance(value, (list, tuple)) else [value]
        odd = [one for one in values if one not in _AMONG[name]]
        if odd and name == "recompute_modules":
            raise ConfigError(
                f"megatron option {given!r}: {odd[0]!r} cannot be recomputed in this model; "
                f"choose from {', '.join(_AMONG[name])}, or recompute_granularity full"
            )
        if odd or (name != "recompute_modules" and values is value):
            raise ConfigError(
                f"megatron option {given!r} is {value!r}; the trainer has "
                f"{' and '.join(_AMONG[name])}"
            )
