"""Which engine serves, and which options it gets."""

import importlib.machinery
import sys

import pytest

from slime_core.cluster.engine_choice import engine_options, resolve_engine
from slime_core.config.loading import load_config
from slime_core.engines.launcher import embedded_command, sglang_command
from slime_core.errors import ConfigError


def config(**changes):
    return load_config("configs/quickstart.yaml", changes)


@pytest.fixture(params=[True, False], ids=["installed", "missing"])
def installed(request, monkeypatch):
    """Whether the sglang package can be found."""

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "sglang" and request.param:
                return importlib.machinery.ModuleSpec(name, None)
            return None

    monkeypatch.setattr(sys, "meta_path", [Finder])
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    return request.param


def test_auto_takes_sglang_on_cuda_where_it_is_installed(installed):
    assert resolve_engine(config(), "cpu") == "embedded"
    assert resolve_engine(config(), "cuda") == ("sglang" if installed else "embedded")


def test_a_named_engine_is_taken_or_refused(installed):
    assert resolve_engine(config(rollout_engine="embedded"), "cuda") == "embedded"
    if installed:
        assert resolve_engine(config(rollout_engine="sglang"), "cpu") == "sglang"
        return
    with pytest.raises(ConfigError, match=r"not installed.*--rollout-engine embedded"):
        resolve_engine(config(rollout_engine="sglang"), "cuda")


def test_sglang_leaves_memory_to_the_trainer_unless_told_otherwise():
    plain = engine_options(config(), "sglang", "cuda", "bfloat16")
    assert plain == {"device": "cuda", "dtype": "bfloat16", "mem_fraction_static": 0.4}
    told = config(sglang={"mem_fraction_static": 0.7})
    assert engine_options(told, "sglang", "cuda", "bfloat16")["mem_fraction_static"] == 0.7
    assert engine_options(config(), "embedded", "cuda", "float32") == {
        "device": "cuda",
        "dtype": "float32",
    }


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_engines_keep_routes_where_they_are_replayed(kind):
    replayed = config(use_rollout_routing_replay=True)
    options = engine_options(replayed, kind, "cuda", "bfloat16")
    assert options["enable_return_routed_experts"] is True
    commands = {"embedded": embedded_command, "sglang": sglang_command}
    assert "--enable-return-routed-experts" in commands[kind]("/m", 31000, options)


def test_float32_on_cuda_needs_sglangs_deterministic_mode():
    options = engine_options(config(), "sglang", "cuda", "float32")
    assert options["enable_deterministic_inference"] is True
