"""Functions written for slime read flags as attributes and cannot change the run."""

import json
from pathlib import Path

import pytest

from slime_core.plugins.args_view import ArgsView
from slime_core.rollout.routed import RouteAsk
from slime_core.rollout.setup import sampling_of
from tests.unit.config.trees import small

QUICKSTART = Path("configs/quickstart")
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 16, "norm_topk_prob": True, "num_hidden_layers": 3}  # fmt: skip


def test_every_flag_is_an_attribute_under_its_name():
    config = small(megatron={"weight_decay": 0.5}, sglang={"mem_fraction_static": 0.7})
    args = ArgsView(config)
    assert args.rollout_batch_size == 4 and args.rm_type == "exact_match"
    assert args.weight_decay == 0.5, "Megatron's options keep their names"
    assert args.sglang_mem_fraction_static == 0.7, "SGLang's have the prefix of their flags"
    assert "lr" in args and "no_such_flag" not in args
    assert vars(args)["seed"] == config.run.seed


def test_the_shape_of_routes_is_told_where_engines_tell_them(tmp_path):
    told = json.loads((QUICKSTART / "model" / "config.json").read_text()) | EXPERTS
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(told))
    folder = str(tmp_path / "m")
    config = small(hf_checkpoint=folder, use_rollout_routing_replay=True)
    args = ArgsView(config)
    assert (args.use_rollout_routing_replay, args.num_layers, args.moe_router_topk) == (True, 3, 2)
    assert ArgsView(small(hf_checkpoint=folder)).num_layers is None
    assert sampling_of(config).routes == RouteAsk(3, 2)
    gone = ArgsView(small(hf_checkpoint=str(tmp_path), use_rollout_routing_replay=True))
    assert gone.num_layers is None, "the check tells of a bad folder"


def test_a_name_that_is_no_flag_is_an_attribute_error():
    with pytest.raises(AttributeError):
        _ = ArgsView(small()).no_such_flag
    assert getattr(ArgsView(small()), "no_such_flag", 3) == 3


def test_what_a_plugin_writes_is_its_own():
    config = small(rollout_stop=["a"], megatron={"nested": {"x": 1}})
    args, other = ArgsView(config), ArgsView(config)
    args.lr = 5.0
    args.mine = "note"
    args.rollout_stop.append("b")
    args.nested["x"] = 2
    assert (args.lr, args.mine, args.rollout_stop) == (5.0, "note", ["a", "b"])
    assert other.lr == config.train.lr and "mine" not in other
    assert config.rollout.rollout_stop == other.rollout_stop == ["a"]
    assert config.megatron == {"nested": {"x": 1}}
