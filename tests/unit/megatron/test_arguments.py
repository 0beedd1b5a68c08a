"""Megatron options: known names, types, and where each one goes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from slime_core.errors import ConfigError
from slime_core.megatron.arguments import check_names, known_names, resolve
from slime_core.megatron.declared import declared_fields
from slime_core.megatron.option_tables import FIXED, NEGATIONS
from slime_core.megatron.settings import TrainerSettings
from slime_core.weights.tables import ModelShape

SHAPE = ModelShape(
    model_type="qwen3",
    num_layers=28,
    hidden_size=1024,
    ffn_size=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    padded_vocab_size=151936,
    max_positions=40960,
    norm_eps=1e-6,
    tied=True,
    rope_theta=1e6,
)


def resolved(**options: Any) -> Any:
    return resolve(TrainerSettings(hf_checkpoint="x", megatron=options), SHAPE)


@pytest.mark.parametrize(
    "option",
    [
        {"virtual_pipeline_model_parallel_size": 7},
        {"num_virtual_stages_per_pipeline_rank": 7},
        {"num_layers_per_virtual_pipeline_stage": 2},
        {"num_layers_per_virtual_pipeline_stage": 2, "num_virtual_stages_per_pipeline_rank": 7},
    ],
)
def test_virtual_stages_can_be_said_in_three_ways(option: dict[str, int]) -> None:
    """28 layers in 2 stages of 7 parts of 2 layers."""
    settings = resolved(pipeline_model_parallel_size=2, **option).settings
    assert settings.virtual_pipeline_model_parallel_size == settings.virtual_stages == 7


def test_one_virtual_stage_is_no_interleaved_pipeline() -> None:
    option = {"num_layers_per_virtual_pipeline_stage": 14}
    assert resolved(pipeline_model_parallel_size=2, **option).settings.virtual_stages is None
    assert resolved().settings.virtual_stages is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_layers_per_virtual_pipeline_stage": 3}, "3 x pipeline_model_parallel_size 2 = 6 do"),
        (
            {"num_virtual_stages_per_pipeline_rank": 2, "num_layers_per_virtual_pipeline_stage": 2},
            "num_virtual_stages_per_pipeline_rank gives 2, num_layers_per_virtual_pipeline_stage "
            "gives 7; keep one",
        ),
        ({"virtual_pipeline_model_parallel_size": 0}, "must be at least 1"),
        ({"num_virtual_stages_per_pipeline_rank": "2"}, "must be int"),
        ({"microbatch_group_size_per_vp_stage": 4}, "is always the number of pipeline stages"),
    ],
)
def test_virtual_stages_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(pipeline_model_parallel_size=2, **options)


def test_a_launch_script_of_qwen3_is_accepted() -> None:
    """The model arguments that slime's script for Qwen3-0.6B passes."""
    flags = {
        "--swiglu": True,
        "--num-layers": 28,
        "--hidden-size": 1024,
        "--ffn-hidden-size": 3072,
        "--num-attention-heads": 16,
        "--group-query-attention": True,
        "--num-query-groups": 8,
        "--use-rotary-position-embeddings": True,
        "--disable-bias-linear": True,
        "--normalization": "RMSNorm",
        "--norm-epsilon": 1e-6,
        "--rotary-base": 1000000,
        "--vocab-size": 151936,
        "--kv-channels": 128,
        "--qk-layernorm": True,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--accumulate-allreduce-grads-in-fp32": True,
        "--attention-softmax-in-fp32": True,
        "--attention-backend": "flash",
    }
    found = resolved(**flags)
    assert found.ddp == {"grad_reduce_in_fp32": True}
    assert found.transformer == {}
    assert set(found.without_effect) == {
        "--group-query-attention", "--attention-backend", "--attention-softmax-in-fp32",
    }  # fmt: skip


def test_each_option_reaches_its_class() -> None:
    found = resolved(
        recompute_granularity="full",
        recompute_num_layers=1,
        recompute_method="uniform",
        adam_beta2=0.95,
        min_lr=1e-8,
        lr_decay_style="cosine",
        tensor_model_parallel_size=2,
        bf16=True,
        loss_scale=1.0,
        decoder_first_pipeline_num_layers=3,
        overlap_grad_reduce=True,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=0.5,
    )
    assert found.transformer == {
        "recompute_granularity": "full",
        "recompute_num_layers": 1,
        "recompute_method": "uniform",
        "num_layers_in_first_pipeline_stage": 3,
    }
    assert found.optimizer == {"loss_scale": 1.0}, "Megatron is not told of the host's states"
    assert found.settings.optimizer_cpu_offload
    assert found.settings.optimizer_offload_fraction == 0.5
    assert found.ddp == {"overlap_grad_reduce": True}
    settings = found.settings
    assert (settings.adam_beta2, settings.min_lr, settings.lr_decay_style) == (0.95, 1e-8, "cosine")
    assert (settings.tensor_model_parallel_size, settings.dtype) == (2, "bfloat16")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recompute_granularty": "full"}, "did you mean 'recompute_granularity'"),
        ({"recompute_num_layers": "1"}, "must be"),
        ({"adam_beta2": True}, "must be float"),
        ({"lr_decay_style": "exponential"}, "must be"),
        ({"lr": 1e-5}, r"set by train\.lr"),
        ({"seed": 3}, r"set by run\.seed"),
        ({"finalize_model_grads_func": None}, "set by the trainer itself"),
        ({"hidden_dropout": 0.1}, "supports 0.0 only"),
        ({"moe_token_dispatcher_type": "flex"}, "has alltoall and allgather"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "has none and aux_loss"),
        ({"moe_router_load_balancing_type": ["none"]}, "has none and aux_loss"),
        ({"moe_expert_capacity_factor": 1.0}, "drops tokens"),
        ({"moe_router_num_groups": 2}, "routes tokens otherwise"),
        ({"moe_layer_freq": [0, 1]}, "all layers have experts"),
        ({"moe_router_score_function": "sigmoid"}, "supports 'softmax' only"),
        ({"normalization": "LayerNorm"}, "supports 'RMSNorm' only"),
        ({"rotary_percent": 0.5}, "supports 1.0 only"),
        ({"swiglu": False}, "supports True only"),
        ({"no_position_embedding": False}, "supports True only"),
        ({"tokenizer_type": "NullTokenizer"}, "supports 'HuggingFaceTokenizer' only"),
        ({"overlap_param_gather": True}, "supports False only"),
        ({"no_check_for_nan_in_loss_and_grad": False}, "supports True only"),
        ({"check_for_nan_in_grad": True}, "supports False only"),
        ({"distributed_backend": True}, "must be str"),
        ({"exp_avg_dtype": "bfloat16"}, "needs Transformer Engine's Adam"),
        ({"optimizer_cpu_offload": 1}, "must be bool"),
        ({"optimizer_offload_fraction": 0.0}, "must be above 0 and at most 1, not 0.0"),
        ({"optimizer_offload_fraction": 1.5}, "must be above 0 and at most 1, not 1.5"),
        ({"use_torch_optimizer_for_cpu_offload": True}, "belongs to Megatron's own offload"),
        ({"cpu_offloading": True}, "needs Transformer Engine"),
        ({"recompute_modules": ["core_attn", "layernorm"]}, "'layernorm' cannot be recomputed"),
        ({"mtp_num_layers": 1}, "supports None only"),
        ({"tensor_model_parallel_size": 0}, "must be at least 1, not 0"),
        ({"pipeline-model-parallel-size": -1}, "must be at least 1, not -1"),
        ({"lr_decay_iters": 0}, "must be at least 1"),
        ({"make_vocab_size_divisible_by": 0}, "must be at least 1"),
        ({"lr_warmup_iters": -3}, "must be at least 0"),
        ({"weight_decay": -0.1}, "must be at least 0"),
        ({"adam_beta1": 1.0}, "must be from 0 to below 1"),
        ({"adam_eps": 0.0}, "must be above 0"),
    ],
)
def test_a_wrong_option_says_what_to_do(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_names(options)


@pytest.mark.parametrize("name", sorted(FIXED))
def test_an_option_with_one_value_takes_no_other(name: str) -> None:
    check_names({name: FIXED[name]})
    assert resolved(**{name: FIXED[name]}).settings == TrainerSettings(
        "x", megatron={name: FIXED[name]}
    )
    with pytest.raises(ConfigError, match=f"'{name}' is 'other', the trainer supports"):
        check_names({name: "other"})


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 27},
        {"ffn_hidden_size": 3073},
        {"num_query_groups": 4},
        {"kv_channels": 64},
        {"vocab_size": 151937},
        {"max_position_embeddings": 4096},
        {"norm_epsilon": 1e-5},
        {"qk_layernorm": False},
        {"add_qkv_bias": True},
        {"untie_embeddings_and_output_weights": True},
        {"rotary_base": 10000},
    ],
)
def test_options_must_agree_with_the_model(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the model's config\.json makes it"):
        resolved(**options)


def test_a_launch_script_of_a_model_with_experts_is_accepted() -> None:
    shape = replace(
        SHAPE, model_type="qwen3_moe", num_experts=8, experts_per_token=2, expert_ffn_size=768
    )
    script = {
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 768,
        "moe_router_score_function": "softmax",
        "moe_token_dispatcher_type": "alltoall",
        "moe_layer_freq": [1] * 28,
        "moe_grouped_gemm": True,
        "moe_token_drop_policy": "probs",
        "moe_router_dtype": "fp32",
        "moe_permute_fusion": True,
        "moe_aux_loss_coeff": 0.0,
    }
    found = resolve(TrainerSettings("x", megatron=script), shape, declared_fields())
    kept = ("moe_token_dispatcher_type", "moe_layer_freq", "moe_router_dtype", "moe_aux_loss_coeff")
    assert found.transformer == {name: script[name] for name in kept}
    assert set(found.without_effect) == {
        "moe_grouped_gemm", "moe_token_drop_policy", "moe_permute_fusion"
    }  # fmt: skip
    for name, value in (("num_experts", 4), ("moe_router_topk", 1), ("moe_ffn_hidden_size", 3072),
                        ("moe_router_pre_softmax", True)):  # fmt: skip
        wrong = TrainerSettings("x", megatron={name: value})
        with pytest.raises(ConfigError, match=rf"'{name}' is .* config\.json makes it"):
            resolve(wrong, shape, declared_fields())
    with pytest.raises(ConfigError, match=r"'num_experts' is 8, .* makes it None"):
        resolved(num_experts=8)


@pytest.mark.parametrize("name", sorted(name for name in NEGATIONS if name.startswith("no_")))
def test_what_is_off_may_be_said_to_be_off(name: str) -> None:
    found = resolved(**{name: True})
    assert (found.transformer, found.optimizer, found.ddp) == ({}, {}, {})
    with pytest.raises(ConfigError, match=f"'{NEGATIONS[name][0]}' is True, the trainer supports"):
        check_names({NEGATIONS[name][0]: True})


def test_the_backend_follows_from_the_device() -> None:
    assert resolved(distributed_backend="gloo").without_effect == ()
    with pytest.raises(ConfigError, match="'nccl', but trainer ranks on cpu talk through gloo"):
        resolved(distributed_backend="nccl")
    on_gpu = TrainerSettings("x", device="cuda", megatron={"distributed-backend": "nccl"})
    assert resolve(on_gpu, SHAPE, declared_fields()).without_effect == ()
    with pytest.raises(ConfigError, match="'gloo', but trainer ranks on cuda talk through nccl"):
        resolve(replace(on_gpu, megatron={"distributed_backend": "gloo"}), SHAPE, declared_fields())


def test_every_known_name_is_accepted_or_refused_for_its_value_only() -> None:
    assert {"recompute_modules", "adam_eps", "no_rope_fusion", "bucket_size"} <= known_names()
    assert not {"lr", "timers", "activation_func"} & known_names()


def test_common_options_are_checked_without_importing_megatron() -> None:
    """The command line checks options before anything starts; Megatron's import takes seconds."""
    program = (
        "import sys\n"
        "from slime_core.megatron.arguments import check_names\n"
        "check_names({'adam_beta2': 0.98, 'weight_decay': 0.0, 'min_lr': 0.0, 'bf16': False,\n"
        "  'tensor_model_parallel_size': 1, 'lr_decay_style': 'constant'})\n"
        "assert 'megatron' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
