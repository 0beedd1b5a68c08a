"""Layouts of trainer ranks in one word: tp2, tp2-sp, pp2dp2."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import ConfigError

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
}
_PART = re.compile(r"(vpp|tp|pp|cp|ep|dp)([1-9]\d*)|sp|[-x,+]")


@dataclass(frozen=True)
class Layout:
    """How ranks share a model.

    Attributes:
        ranks: how many there are.
        megatron: the options that say so.
    """

    ranks: int = 1
    megatron: dict[str, Any] = field(default_factory=dict)

    @property
    def overrides(self) -> dict[str, Any]:
        """Values over a configuration. Several ranks are processes on the CPU."""
        found: dict[str, Any] = {
            "actor_num_nodes": 1,
            "actor_num_gpus_per_node": self.ranks,
            "megatron": self.megatron,
        }
        return found if self.ranks == 1 else found | {"device": "cpu"}


def parse_layout(text: str) -> Layout:
    """Reads a layout; what is not named has the size 1.

    Raises:
        ConfigError: it is none.
    """
    sizes: dict[str, int] = {}
    sequence, place = False, 0
    while place < len(text):
        part = _PART.match(text, place)
        if part is None or part[1] in sizes:
            raise _refused(text)
        place = part.end()
        if part[1]:
            sizes[part[1]] = int(part[2])
        sequence = sequence or part[0] == "sp"
    if not sizes:
        raise _refused(text)
    size = {name: sizes.get(name, 1) for name in ("tp", "pp", "cp")}
    data = sizes.get("dp", max(1, sizes.get("ep", 1) // size["cp"]))
    megatron: dict[str, Any] = {_SIZES[name]: sizes[name] for name in _SIZES if name in sizes}
    if sequence:
        megatron["sequence_parallel"] = True
    return Layout(size["tp"] * size["pp"] * size["cp"] * data, megatron)


def _refused(text: str) -> ConfigError:
    return ConfigError(
        f"layout {text!r}: write sizes such as tp2, tp2-sp, pp2, dp2, tp2pp2 (tp tensor, pp "
        "pipeline, dp data, cp context, ep expert parallel, vpp stages a rank)"
    )
