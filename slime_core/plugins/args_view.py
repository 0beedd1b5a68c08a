"""The `args` that custom functions written for slime receive."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from slime_core.errors import ConfigError
from slime_core.plugins.upstream_args import DEFAULT_PATHS, UPSTREAM
from slime_core.weights.tables import read_shape

if TYPE_CHECKING:
    from slime_core.config.tree import RunConfig


class ArgsView:
    """Reads every configuration field as an attribute under its flag name.

    slime's names that are no fields here have slime's defaults; `custom_config` adds more names.
    Whatever is written, also into a list or dict found here, is private to this view: the
    configuration never changes.
    """

    def __init__(self, config: RunConfig) -> None:
        flat: dict[str, Any] = dict(UPSTREAM)
        for group in type(config).model_fields:
            content = getattr(config, group)
            if isinstance(content, dict):
                prefix = "sglang_" if group == "sglang" else ""
                flat |= {f"{prefix}{name}": value for name, value in content.items()}
            else:
                flat |= {name: getattr(content, name) for name in type(content).model_fields}
        flat["rollout_global_dataset"] = not config.data.disable_rollout_global_dataset
        flat["custom_generate_function_path"] = config.rollout.generate_path
        if config.algorithm.use_rollout_routing_replay:  # shape of the routes in an answer
            flat |= routes_shape(config.rollout.hf_checkpoint)
        flat |= {name: value for name, value in DEFAULT_PATHS.items() if flat.get(name) is None}
        self.__dict__.update(copy.deepcopy(flat | config.rollout.custom_config))

    def __contains__(self, name: str) -> bool:
        return name in self.__dict__


def routes_shape(hf_checkpoint: str) -> dict[str, int | None]:
    """num_layers and moe_router_topk of a model; nothing where the check refuses its folder."""
    try:
        shape = read_shape(hf_checkpoint)
    except ConfigError:
        return {}
    return {"num_layers": shape.num_layers, "moe_router_topk": shape.experts_per_token}
