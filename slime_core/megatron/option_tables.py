"""Megatron options by name, by what becomes of each. arguments.py sorts by these tables."""

from __future__ import annotations

# Megatron option -> field of ModelShape. They follow from config.json and are only compared.
FROM_MODEL = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_size",
    "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
    "norm_epsilon": "norm_eps",
    "layernorm_epsilon": "norm_eps",
    "rotary_base": "rope_theta",
    "rope_scaling_factor": "rope_factor",
    "num_experts": "num_experts",
    "num_moe_experts": "num_experts",
    "moe_ffn_hidden_size": "expert_ffn_size",
    "moe_router_topk": "experts_per_token",
}
# Options whose only possible value follows from what the trainer builds.
FIXED = {
    "swiglu": True,
    "gated_linear_unit": True,
    "disable_bias_linear": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "use_rotary_position_embeddings": True,
    "no_position_embedding": True,
    "tokenizer_type": "HuggingFaceTokenizer",
    "ckpt_format": "torch_dist",
    "override_opt_param_scheduler": True,  # the configuration decides after a resume, too
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "apply_layernorm_1p": False,
    "layernorm_zero_centered_gamma": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_distributed_optimizer": True,
    "optimizer": "adam",
    "overlap_param_gather": False,  # weights are read right after a step
    "transformer_impl": "local",
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_shared_expert_intermediate_size": None,
    "moe_use_legacy_grouped_gemm": False,
    "multi_latent_attention": False,
    "mtp_num_layers": None,
    "fp16": False,
    # A step whose loss or gradients are not finite is skipped and recorded; it never ends the run.
    "no_check_for_nan_in_loss_and_grad": True,
    "check_for_nan_in_grad": False,
}
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# A flag that switches something off: option -> (field, value).
NEGATIONS = {
    "no_rope_fusion": ("apply_rope_fusion", False),
    "no_masked_softmax_fusion": ("masked_softmax_fusion", False),
    "no_bias_swiglu_fusion": ("bias_activation_fusion", False),
    "no_bias_dropout_fusion": ("bias_dropout_fusion", False),
    "no_gradient_accumulation_fusion": ("gradient_accumulation_fusion", False),
    "no_persist_layer_norm": ("persist_layer_norm", False),
    "accumulate_allreduce_grads_in_fp32": ("grad_reduce_in_fp32", True),
}
RENAMED = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
# Other ways of saying virtual_pipeline_model_parallel_size.
VIRTUAL_STAGES = frozenset(
    {"num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"}
)
# Accepted because launch scripts carry them; they cannot change anything here.
WITHOUT_EFFECT = frozenset(
    {
        "attention_backend",
        "attention_softmax_in_fp32",
        "group_query_attention",
        "seq_length",
        "use_mcore_models",
        "log_interval",
        "cross_entropy_loss_fusion",
        "moe_token_drop_policy",  # without a capacity nothing is dropped
        # The same numbers by kernels of Transformer Engine's, which is not used yet.
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "moe_router_fusion",
        "overlap_cpu_optimizer_d2h_h2d",  # the same numbers in another order of copies
        "use_precision_aware_optimizer",  # states are float32, its own default; others are refused
    }
)
# Options with a place of their own in the configuration tree.
ELSEWHERE = {
    "calculate_per_token_loss": "algorithm.calculate_per_token_loss",
    "clip_grad": "train.clip_grad",
    "global_batch_size": "train.global_batch_size",
    "load": "rollout.hf_checkpoint, or resume",
    "lr": "train.lr",
    "micro_batch_size": "train.micro_batch_size",
    "save": "store.store_url",
    "save_interval": "train.save_interval",
    "seed": "run.seed",
    "train_iters": "run.num_rollout",
}
SETTINGS = frozenset(
    {
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "lr_decay_iters",
        "lr_decay_style",
        "lr_warmup_init",
        "lr_warmup_iters",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_style",
        "make_vocab_size_divisible_by",
        "min_lr",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "pipeline_model_parallel_size",
        "sequence_parallel",
        "tensor_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "weight_decay",
    }
)
# Set by the trainer itself; not a user's choice.
INTERNAL = frozenset(
    {
        "finalize_model_grads_func",
        "grad_scale_func",
        "grad_sync_func",
        "no_sync_func",
        "param_sync_func",
        "timers",
        "_cpu_offloading_context",
        "activation_func",
        "init_method",
        "output_layer_init_method",
        "embedding_init_method",
        "params_dtype",
        "pipeline_dtype",
        "autocast_dtype",
        "enable_autocast",
        "perform_initialization",
        "use_cpu_initialization",
        "variable_seq_lengths",
        "average_in_collective",
    }
)
SWITCHES = frozenset(
    {
        "bf16",
        "qk_layernorm",
        "add_qkv_bias",
        "untie_embeddings_and_output_weights",
        "use_rope_scaling",
    }
)
# Types of options whose value is compared or ignored, where it is not bool.
TEXTS = frozenset({"attention_backend", "distributed_backend"})
NUMBERS = frozenset({"norm_epsilon", "layernorm_epsilon", "rotary_base", "rope_scaling_factor"})
COUNTS = frozenset({"seq_length", "log_interval", *FROM_MODEL} - NUMBERS)
