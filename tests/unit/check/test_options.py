"""What is said about options that launch scripts carry and that change nothing here."""

import pytest

from slime_core.check.findings import Findings
from slime_core.check.options import check_megatron
from slime_core.errors import ConfigError
from slime_core.weights.tables import read_shape
from tests.unit.check.model_folders import QUICKSTART, copy_of_the_model
from tests.unit.config.trees import small


def notes(**overrides) -> list[str]:
    findings = Findings()
    assert check_megatron(small(**overrides), "cpu", None, findings)
    return findings.notes


def test_a_seq_length_below_what_the_run_makes_is_a_note():
    short = notes(megatron={"seq_length": 7}, rollout_max_response_len=8)
    assert short == [
        "--seq-length 7 is shorter than the 8 tokens that a sequence may have; it bounds nothing "
        "here, sequences are packed"
    ]
    assert notes(megatron={"seq_length": 8}, rollout_max_response_len=8) == []
    assert notes(megatron={"seq_length": 8}, rollout_max_context_len=9)


def problems(ranks: int, **megatron) -> list[str]:
    """Of the quickstart's model on so many ranks."""
    folder = str(QUICKSTART.with_suffix("") / "model")
    findings = Findings()
    config = small(
        hf_checkpoint=folder, device="cpu", actor_num_gpus_per_node=ranks, megatron=megatron
    )
    check_megatron(config, "cpu", read_shape(folder), findings)
    return findings.problems


@pytest.mark.parametrize("name", ["attention_backend", "attention_softmax_in_fp32", "log_interval",
    "cross_entropy_loss_fusion", "group_query_attention", "use_mcore_models",
    "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer"])  # fmt: skip
def test_options_that_change_nothing_are_named(name):
    folder = str(QUICKSTART.with_suffix("") / "model")
    value = {"attention_backend": "flash", "log_interval": 5}.get(name, True)
    config = small(hf_checkpoint=folder, device="cpu", megatron={name: value})
    findings = Findings()
    assert check_megatron(config, "cpu", read_shape(folder), findings)
    assert findings.notes == [f"megatron: without effect here: {name}"]


def test_a_recomputation_is_whole_or_refused():
    whole = {"recompute_method": "uniform", "recompute_num_layers": 1}
    assert problems(1, recompute_granularity="full", **whole) == []
    assert problems(1, recompute_granularity="selective") == []
    (lacks,) = problems(1, recompute_granularity="full")
    assert "full needs recompute_method and recompute_num_layers, such as" in lacks
    (half,) = problems(1, recompute_granularity="full", recompute_method="block")
    assert "full needs recompute_num_layers, such as" in half
    (more,) = problems(1, recompute_granularity="selective", **whole)
    assert "is selective, but only full takes recompute_method and recompute_num_layers" in more
    (alone,) = problems(1, recompute_num_layers=1)
    assert "recompute_granularity is None, but only full takes recompute_num_layers: set" in alone


EP2 = {"expert_model_parallel_size": 2}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def problems_of_experts(folder, ranks: int, **megatron) -> list[str]:
    """Of a model with four experts."""
    path = copy_of_the_model(
        folder / "m", model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, norm_topk_prob=True,
    )  # fmt: skip
    findings = Findings()
    config = small(
        hf_checkpoint=str(path), device="cpu", actor_num_gpus_per_node=ranks, megatron=megatron
    )
    check_megatron(config, "cpu", read_shape(path), findings)
    return findings.problems


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        (2, {"tensor_model_parallel_size": 2}, "needs sequence_parallel, too"),
        (
            2,
            {"pipeline_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"},
            "pipeline of 2 stages: use alltoall",
        ),
        (4, EP2 | TP2_SP, "unequal numbers of tokens (gloo): use expert_tensor_parallel_size 1"),
        (3, {"expert_model_parallel_size": 3}, "size 3 does not divide the model's num_experts 4"),
        (
            3,
            TP2_SP | {"tensor_model_parallel_size": 3, "expert_tensor_parallel_size": 3},
            "does not divide the model's",
        ),
        (
            3,
            {"tensor_model_parallel_size": 3, "sequence_parallel": True},
            "does not divide the model's",
        ),
    ],
)
def test_experts_that_cannot_be_had_are_told_before_a_start(ranks, options, words, tmp_path):
    (found,) = problems_of_experts(tmp_path, ranks, **options)
    assert words in found


def test_ranks_with_other_tokens_cannot_share_an_expert(tmp_path):
    with pytest.raises(ConfigError, match="2 is above tensor_model_parallel_size 1"):
        problems_of_experts(tmp_path, 2, expert_tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"moe_token_dispatcher_type": "allgather"}),
        (2, EP2),
        (4, EP2),
        (2, EP2 | {"context_parallel_size": 2}),
        (2, EP2 | TP2_SP | {"expert_tensor_parallel_size": 1}),
        (4, EP2 | TP2_SP | {"expert_tensor_parallel_size": 1}),
    ],
)
def test_experts_that_can_be_dealt_are_fine(ranks, options, tmp_path):
    assert problems_of_experts(tmp_path, ranks, **options) == []


def test_a_dense_model_has_no_experts_to_deal():
    (found,) = problems(2, expert_model_parallel_size=2)
    assert "expert_model_parallel_size 2: a qwen3 model has no experts, so use 1" in found


@pytest.mark.parametrize("flag", ["use_routing_replay", "use_rollout_routing_replay"])
def test_a_dense_model_has_no_routes_to_replay(flag):
    folder = str(QUICKSTART.with_suffix("") / "model")
    findings = Findings()
    config = small(hf_checkpoint=folder, device="cpu", **{flag: True})
    check_megatron(config, "cpu", read_shape(folder), findings)
    (found,) = findings.problems
    assert f"{flag}: a qwen3 model has no experts, so leave it out" in found


def test_a_model_that_cannot_be_cut_for_its_ranks_is_told_before_a_start():
    assert problems(2) == problems(2, tensor_model_parallel_size=2) == []
    assert problems(2, pipeline_model_parallel_size=2) == []
    (heads,) = problems(3, tensor_model_parallel_size=3)
    assert "size 3 does not divide the model's num_attention_heads" in heads
    (layers,) = problems(3, pipeline_model_parallel_size=3)
    assert "layers cannot be dealt evenly to pipeline_model_parallel_size 3" in layers
    (sequence,) = problems(2, sequence_parallel=True)
    assert "sequence_parallel needs tensor_model_parallel_size above 1" in sequence


def problems_of_interleaved(folder, ranks: int, layers: int, **megatron) -> list[str]:
    """Of a model with so many layers, in two stages of two parts each."""
    path = copy_of_the_model(folder / f"m{ranks}", num_hidden_layers=layers)
    options = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    findings = Findings()
    config = small(
        hf_checkpoint=str(path),
        device="cpu",
        actor_num_gpus_per_node=ranks,
        megatron=options | megatron,
    )
    check_megatron(config, "cpu", read_shape(path), findings)
    return findings.problems


@pytest.mark.parametrize(
    ("ranks", "layers", "options", "words"),
    [
        (2, 4, {"overlap_p2p_comm": False}, "2 needs overlap_p2p_comm and no batch_p2p_comm"),
        (2, 4, {"batch_p2p_comm": True}, "2 needs overlap_p2p_comm and no batch_p2p_comm"),
        (2, 6, {}, "6 layers cannot be dealt to pipeline_model_parallel_size 2 x virtual_pipeline"),
        (2, 4, {"decoder_first_pipeline_num_layers": 1}, "hold equally many layers each: leave"),
        (1, 4, {"pipeline_model_parallel_size": 1}, "needs pipeline_model_parallel_size above 1"),
    ],
)
def test_an_interleaved_pipeline_that_cannot_be_had_is_told_before_a_start(
    ranks, layers, options, words, tmp_path
):
    (found,) = problems_of_interleaved(tmp_path, ranks, layers, **options)
    assert words in found


@pytest.mark.parametrize("layers_a_stage", [3, 4])
def test_layers_of_a_virtual_stage_are_checked_together_with_the_stages(layers_a_stage, tmp_path):
    path = copy_of_the_model(tmp_path / "m", num_hidden_layers=4)
    options = {
        "num_layers_per_virtual_pipeline_stage": layers_a_stage,
        "pipeline_model_parallel_size": 2,
    }
    findings = Findings()
    config = small(
        hf_checkpoint=str(path), device="cpu", actor_num_gpus_per_node=2, megatron=options
    )
    assert not check_megatron(config, "cpu", read_shape(path), findings)
    (found,) = findings.problems
    assert f"{layers_a_stage} x pipeline_model_parallel_size 2 = {2 * layers_a_stage}" in found


def test_an_interleaved_pipeline_that_divides_the_layers_is_fine(tmp_path):
    assert problems_of_interleaved(tmp_path, 2, 4) == []
    assert problems_of_interleaved(tmp_path, 4, 4, overlap_p2p_comm=True) == []
