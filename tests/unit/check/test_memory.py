"""The plan of memory follows layout, precision, recomputation and the choice of parameters."""

from dataclasses import replace

import pytest

from slime_core.check.memory import trainer_memory
from slime_core.check.plan import plan
from slime_core.megatron.settings import TrainerSettings
from slime_core.weights.tables import active_parameters, read_shape
from tests.unit.check.test_refusals import QUICKSTART
from tests.unit.config.trees import small

SHAPE = read_shape(QUICKSTART.parent / "quickstart" / "model")
ONE = TrainerSettings(hf_checkpoint="m", world_size=1)
FULL = {"recompute_granularity": "full"}


def planned(tokens: int = 1000, **changes):
    return trainer_memory(replace(ONE, **changes), SHAPE, tokens)


def test_states_are_counted_by_the_parameter():
    alone = planned().states_bytes
    parameters = alone // 16
    assert alone == 16 * parameters
    assert planned(dtype="bfloat16").states_bytes == 18 * parameters
    assert planned(world_size=2).states_bytes == 12 * parameters, "moments are shared"
    assert planned(world_size=2, tensor_model_parallel_size=2).states_bytes == 8 * parameters
    frozen = planned(freeze_params_name_list=["decoder"]).states_bytes
    assert 4 * parameters < frozen < alone


def test_states_that_the_host_keeps_are_not_counted_on_a_gpu():
    parameters = planned().states_bytes // 16
    away = {"device": "cuda", "optimizer_cpu_offload": True}
    assert planned(**away).states_bytes == 8 * parameters, "weights and gradients"
    assert planned(**away).update_bytes == 0
    bf16 = planned(**away, dtype="bfloat16")
    assert (bf16.states_bytes, bf16.update_bytes) == (6 * parameters, 4 * parameters)
    assert planned(**away, dtype="bfloat16", world_size=2).update_bytes == 2 * parameters
    half = planned(**away, dtype="bfloat16", optimizer_offload_fraction=0.5)
    assert (half.states_bytes, half.update_bytes) == (12 * parameters, 2 * parameters)
    assert planned(**away | {"device": "cpu"}) == planned(), "its memory is the host's"


def test_the_plan_tells_what_the_host_keeps():
    def found(device, **megatron):
        folder = str(QUICKSTART.parent / "quickstart" / "model")
        config = small(hf_checkpoint=folder, rollout_max_prompt_len=8, megatron=megatron)
        return plan(config, device, "embedded", SHAPE)

    size = found("cuda")["parameters"]
    assert found("cuda")["trainer_bytes"] == 16 * size
    away = found("cuda", **{"--optimizer-cpu-offload": True})
    assert away["trainer_bytes"] == away["trainer_bytes_a_rank"] == 8 * size
    assert away["optimizer_bytes_on_host"] == 8 * size
    assert away["policy_peak_bytes_a_rank"] == found("cuda")["policy_peak_bytes_a_rank"] - 8 * size
    assert found("cpu", optimizer_cpu_offload=True) == found("cpu")


def test_masters_come_when_activations_are_gone():
    away = {"device": "cuda", "optimizer_cpu_offload": True, "dtype": "bfloat16"}
    long, short = planned(1000, **away), planned(1, **away)
    assert long.update_bytes < long.activations_bytes
    assert long.peak_bytes == long.states_bytes + long.activations_bytes + long.logits_bytes
    assert short.peak_bytes == short.states_bytes + short.update_bytes


def test_of_experts_all_are_held_and_few_are_met():
    shape = replace(
        SHAPE, model_type="qwen3_moe", num_experts=8, experts_per_token=2,
        expert_ffn_size=SHAPE.ffn_size,
    )  # fmt: skip
    dense, sparse = planned(), trainer_memory(ONE, shape, 1000)
    one = 3 * SHAPE.hidden_size * SHAPE.ffn_size
    more = SHAPE.num_layers * (7 * one + 8 * SHAPE.hidden_size)
    assert sparse.states_bytes == dense.states_bytes + 16 * more
    halves = replace(ONE, world_size=2, expert_model_parallel_size=2)
    experts = SHAPE.num_layers * 8 * one
    rest = sparse.states_bytes // 16 - experts
    assert trainer_memory(halves, shape, 1000).states_bytes == 12 * rest + 16 * experts // 2
    more_experts = trainer_memory(ONE, replace(shape, num_experts=16), 1000)
    assert more_experts.activations_bytes == sparse.activations_bytes > dense.activations_bytes
    assert active_parameters(shape) == active_parameters(SHAPE) + SHAPE.num_layers * (
        one + 8 * SHAPE.hidden_size
    )


@pytest.mark.parametrize("tokens", [1000, 4000])
def test_activations_grow_with_tokens_and_shrink_with_recomputation(tokens):
    plain = planned(tokens).activations_bytes
    assert plain == pytest.approx(tokens / 1000 * planned(1000).activations_bytes)
    whole = planned(tokens, megatron=FULL).activations_bytes
    part = planned(tokens, megatron={"recompute_modules": ["mlp"]}).activations_bytes
    assert whole < part < plain
    split = planned(tokens, world_size=2, context_parallel_size=2).activations_bytes
    assert split == pytest.approx(plain / 2)


def test_logits_are_bounded_by_their_chunk():
    chunk = replace(ONE, logits_chunk_tokens=100)
    found = [trainer_memory(chunk, SHAPE, tokens).logits_bytes for tokens in (50, 100, 5000)]
    assert found[0] * 2 == found[1] == found[2]
