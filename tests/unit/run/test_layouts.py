"""Layouts in one word."""

import pytest

from slime_core.errors import ConfigError
from slime_core.run.layouts import parse_layout

TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("text", "ranks", "megatron"),
    [
        ("tp1", 1, {TENSOR: 1}),
        ("tp2", 2, {TENSOR: 2}),
        ("tp2-sp", 2, {TENSOR: 2, "sequence_parallel": True}),
        ("dp3", 3, {}),
        ("tp2pp2", 4, {TENSOR: 2, PIPELINE: 2}),
        ("pp2xdp2", 4, {PIPELINE: 2}),
        ("cp2", 2, {"context_parallel_size": 2}),
        ("ep2", 2, {"expert_model_parallel_size": 2}),
        ("ep2dp4", 4, {"expert_model_parallel_size": 2}),
        ("pp2vpp2", 2, {PIPELINE: 2, "virtual_pipeline_model_parallel_size": 2}),
    ],
)
def test_sizes(text, ranks, megatron):
    layout = parse_layout(text)
    assert (layout.ranks, layout.megatron) == (ranks, megatron)
    assert layout.overrides["actor_num_gpus_per_node"] == ranks
    assert layout.overrides.get("device") == (None if ranks == 1 else "cpu")


@pytest.mark.parametrize("text", ["", "sp", "tp", "tp0", "tp2tp2", "2tp", "tp2 pp2", "tp-2", "xp2"])
def test_what_is_none_is_told_with_examples(text):
    with pytest.raises(ConfigError, match="such as tp2, tp2-sp"):
        parse_layout(text)
