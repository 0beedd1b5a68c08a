"""Names that plug-ins read from `args` and that are no fields here, with slime's defaults."""

from __future__ import annotations

from typing import Any

ROUTER_HOST, ROUTER_PORT = "engines.invalid", 30000
"""What plug-ins see as the address of SGLang's router. It is none: `slime.utils.http_utils.post`
takes requests for it to the run's engines."""

DEFAULT_PATHS = {
    "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
    "data_source_path": "slime.rollout.data_source.RolloutDataSourceWithBuffer",
}
"""What slime has where nothing is set; these names stand for our own loop and reader."""

UPSTREAM: dict[str, Any] = {
    "sglang_router_ip": ROUTER_HOST,
    "sglang_router_port": ROUTER_PORT,
    "sglang_router_policy": None,
    "sglang_router_request_timeout_secs": 14400,
    "sglang_enable_deterministic_inference": False,
    "rollout_external_engine_addrs": None,
    "custom_config_path": None,
    "start_rollout_id": None,
    "num_epoch": None,
    "update_weights_interval": 1,
    "colocate": False,
    "offload": False,
    "offload_rollout": False,
    "use_fault_tolerance": True,
    "use_distributed_post": False,
    "use_critic": False,
    "eval_tool_key": None,
    "eval_max_prompt_len": None,
    "eval_max_context_len": None,
    "eval_min_new_tokens": None,
    "balance_data": False,
    "loss_mask_type": "qwen",
    "log_passrate": False,
    "log_multi_turn": False,
    "log_reward_category": None,
    "use_wandb": False,
    "use_tensorboard": False,
    "dump_details": None,
    "ci_test": False,
    "opd_type": None,
    "num_layers": None,
    "moe_router_topk": None,
    "optimizer_cpu_offload": False,
}
