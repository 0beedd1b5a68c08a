"""Functions written for slime read flags as attributes and cannot change the run."""

import pytest

from slime_core.plugins.args_view import ArgsView
from tests.unit.config.trees import small


def test_every_flag_is_an_attribute_under_its_name():
    config = small(megatron={"weight_decay": 0.5}, sglang={"mem_fraction_static": 0.7})
    args = ArgsView(config)
    assert args.rollout_batch_size == 4 and args.rm_type == "exact_match"
    assert args.weight_decay == 0.5, "Megatron's options keep their names"
    assert args.sglang_mem_fraction_static == 0.7, "SGLang's have the prefix of their flags"
    assert "lr" in args and "no_such_flag" not in args
    assert vars(args)["seed"] == config.run.seed


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
