"""slime's module names, where slime itself is not installed, so that its plug-ins import here.

Each name stands for one of ours and is looked up when it is first used.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_NAMES = "slime_core.rollout.slime_names"
_ROLLOUT = "slime_core.rollout.slime_rollout"
_MATH = "slime_core.rewards.slime_math"
_TYPES = {
    "Sample": "slime_core.sample:Sample",
    "Status": "slime_core.sample:Status",
    "RolloutBatch": f"{_NAMES}:RolloutBatch",
}
_HELPERS = "slime_core.plugins.slime_helpers"
_FILTERS = "slime_core.rollout.filters"
_SOURCES = "slime_core.data.source_classes"
ALIASES: dict[str, dict[str, str]] = {
    "slime": {},
    "slime.data": {
        "Sample": "slime_core.sample:Sample",
        "RolloutDataSource": f"{_SOURCES}:FlatDataSource",
        "RolloutDataSourceWithBuffer": f"{_SOURCES}:FlatDataSourceWithBuffer",
    },
    "slime.utils": {},
    "slime.utils.data": {"Dataset": f"{_SOURCES}:SlimeDataset"},
    "slime.utils.types": _TYPES,
    "slime.utils.http_utils": {
        "post": f"{_NAMES}:post",
        "get": f"{_NAMES}:get",
        "init_http_client": f"{_NAMES}:init_http_client",
    },
    "slime.utils.misc": {
        "load_function": "slime_core.plugins.load:load",
        "SingletonMeta": f"{_NAMES}:SingletonMeta",
        "group_by": f"{_HELPERS}:group_by",
    },
    "slime.utils.async_utils": {"run": f"{_NAMES}:run"},
    "slime.utils.mask_utils": {
        "MultiTurnLossMaskGenerator": "slime_core.data.loss_masks:MultiTurnLossMaskGenerator",
        "get_response_lengths": f"{_HELPERS}:get_response_lengths",
    },
    "slime.utils.arguments": {"parse_args": f"{_HELPERS}:parse_args"},
    "slime.utils.metric_utils": {
        "dict_add_prefix": f"{_HELPERS}:dict_add_prefix",
        "compute_statistics": f"{_HELPERS}:compute_statistics",
    },
    "slime.utils.processing_utils": {
        "encode_image_for_rollout_engine": f"{_HELPERS}:encode_image_for_rollout_engine",
        "load_tokenizer": f"{_HELPERS}:load_tokenizer",
        "load_processor": f"{_HELPERS}:load_processor",
    },
    "slime.rollout": {},
    "slime.rollout.data_source": {
        "DataSource": f"{_SOURCES}:DataSource",
        "RolloutDataSource": f"{_SOURCES}:RolloutDataSource",
        "RolloutDataSourceWithBuffer": f"{_SOURCES}:RolloutDataSourceWithBuffer",
        "pop_first": f"{_NAMES}:pop_first",
    },
    "slime.rollout.base_types": {
        "RolloutFnTrainOutput": f"{_NAMES}:RolloutFnTrainOutput",
        "RolloutFnEvalOutput": f"{_NAMES}:RolloutFnEvalOutput",
    },
    "slime.rollout.sglang_rollout": {
        "GenerateState": f"{_NAMES}:GenerateState",
        "generate": f"{_NAMES}:generate",
        "generate_and_rm": f"{_NAMES}:generate_and_rm",
        **{
            name: f"{_ROLLOUT}:{name}"
            for name in (
                "generate_and_rm_group",
                "generate_rollout",
                "generate_rollout_async",
                "eval_rollout",
                "abort",
            )
        },
    },
    "slime.rollout.fully_async_rollout": {
        "generate_rollout_fully_async": f"{_ROLLOUT}:generate_rollout_fully_async"
    },
    "slime.rollout.sft_rollout": {"generate_rollout": f"{_ROLLOUT}:sft_rollout"},
    "slime.rollout.rm_hub": {
        "async_rm": f"{_NAMES}:async_rm",
        "batched_async_rm": f"{_NAMES}:batched_async_rm",
    },
    "slime.rollout.rm_hub.math_dapo_utils": {"compute_score": f"{_MATH}:compute_score"},
    "slime.rollout.rm_hub.deepscaler": {
        "get_deepscaler_rule_based_reward": f"{_MATH}:get_deepscaler_rule_based_reward"
    },
    "slime.rollout.rm_hub.math_utils": {
        "extract_answer": f"{_MATH}:extract_answer",
        "grade_answer_verl": f"{_MATH}:grade_answer_verl",
        "extract_boxed_answer": f"{_MATH}:extract_answer",
        "grade_answer_sympy": f"{_MATH}:grade_answer_sympy",
        "grade_answer_mathd": f"{_MATH}:grade_answer_sympy",
    },
    "slime.rollout.rm_hub.gpqa": {"compute_gpqa_reward": f"{_MATH}:compute_gpqa_reward"},
    "slime.rollout.rm_hub.ifbench": {"compute_ifbench_reward": f"{_MATH}:compute_ifbench_reward"},
    "slime.rollout.rm_hub.f1": {"f1_score": "slime_core.rewards.qa:f1_score"},
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {
        "DynamicFilterOutput": f"{_FILTERS}:DynamicFilterOutput",
        "call_dynamic_filter": f"{_HELPERS}:call_dynamic_filter",
    },
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        "DynamicFilterOutput": f"{_FILTERS}:DynamicFilterOutput",
        "check_reward_nonzero_std": f"{_FILTERS}:check_reward_nonzero_std",
        "check_reward_nonzero_std_with_fallback": (
            f"{_FILTERS}:check_reward_nonzero_std_with_fallback"
        ),
    },
}


class AliasModule(ModuleType):
    """A module whose names stand for ours."""

    def __init__(self, name: str, names: dict[str, str]) -> None:
        super().__init__(name, f"Names of {name} that slime-flow offers to plug-ins.")
        self._names = names
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        target = self._names.get(name)
        if target is None:
            offered = ", ".join(sorted(self._names)) or "only modules"
            raise ImportError(
                f"{self.__name__} of slime-flow has no {name}; it has {offered} (install slime to "
                "use its own)"
            )
        module, _, attribute = target.partition(":")
        value = getattr(importlib.import_module(module), attribute)
        setattr(self, name, value)
        return value


def install() -> None:
    """Puts the names where `import slime` finds them; does nothing where slime is installed."""
    if "slime" in sys.modules or importlib.util.find_spec("slime") is not None:
        return
    for name, names in ALIASES.items():
        module = AliasModule(name, names)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
