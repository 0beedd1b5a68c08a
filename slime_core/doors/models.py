"""Presets: the dimensions of known models, as Megatron's options.

The data lies in models.csv. configs/models/*.yaml is made from it by
`slime models export --all configs/models --format yaml`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from slime_core.errors import ConfigError
from slime_core.near import nearest
from slime_core.weights.tables import ModelShape, bind

DATA = Path(__file__).with_suffix(".csv")
ALWAYS = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "use_rotary_position_embeddings": True,
    "group_query_attention": True,
}


@dataclass(frozen=True)
class Preset:
    """One row.

    Attributes:
        name: as slime's model scripts are called.
        family: model_type of config.json.
        waits_for: what the trainer lacks; empty where it can train the model.
        numbers: column -> number, where the model has one.
        experts, special: what else the later ones have, in slime's short hand.
    """

    name: str
    family: str
    waits_for: str
    numbers: Mapping[str, float]
    experts: str
    special: str

    def options(self) -> dict[str, Any]:
        """Megatron's options by name.

        Raises:
            ConfigError: a model that the trainer cannot train yet.
        """
        self._require()
        n = self.numbers
        sizes = {
            "num_layers": n["layers"],
            "hidden_size": n["hidden"],
            "ffn_hidden_size": n["ffn"],
            "num_attention_heads": n["heads"],
            "num_query_groups": n["groups"],
            "kv_channels": n["kv_channels"],
            "vocab_size": n["vocab"],
            "rotary_base": n["rotary_base"],
        }
        found: dict[str, Any] = ALWAYS | {name: int(value) for name, value in sizes.items()}
        found["norm_epsilon"] = n["norm_epsilon"]
        found["qk_layernorm"] = bool(n["qk_norm"])
        found["add_qkv_bias"] = bool(n["qkv_bias"])
        found["untie_embeddings_and_output_weights"] = not n["tied"]
        if "max_positions" in n:
            found["max_position_embeddings"] = int(n["max_positions"])
        if "rope_scaling" in n:
            found |= {"use_rope_scaling": True, "rope_scaling_factor": n["rope_scaling"]}
        return found

    def parameters(self) -> int:
        """Number of parameters.

        Raises:
            ConfigError: a model that the trainer cannot train yet.
        """
        self._require()
        return sum(math.prod(size) for entry in bind(self._shape()) for size in entry.hf_shapes)

    def yaml(self) -> str:
        """A configuration to be extended."""
        head = (
            f"# {self.name}: {self.parameters():,} parameters. Where config.json of hf_checkpoint"
        )
        return f"{head}\n# says otherwise, every difference is an error.\n" + yaml.safe_dump(
            {"megatron": self.options()}, sort_keys=False
        )

    def bash(self) -> str:
        """MODEL_ARGS and CKPT_ARGS, to be sourced by a launch script."""
        flags = []
        for name, value in self.options().items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                flags.append(flag)
            elif value is not False:
                flags.append(f"{flag} {value}")
        lines = "".join(f"   {flag}\n" for flag in flags)
        variable = '"${HF_CHECKPOINT:?the folder of the model}"'
        return f"MODEL_ARGS=(\n{lines})\nCKPT_ARGS=(\n   --hf-checkpoint {variable}\n)\n"

    def _shape(self) -> ModelShape:
        n = {name: int(value) for name, value in self.numbers.items()}
        return ModelShape(
            self.family, n["layers"], n["hidden"], n["ffn"], n["heads"], n["groups"],
            n["kv_channels"], n["vocab"], n["vocab"], n.get("max_positions", 0),
            self.numbers["norm_epsilon"], bool(n["tied"]), self.numbers["rotary_base"],
        )  # fmt: skip

    def _require(self) -> None:
        if self.waits_for:
            raise ConfigError(f"model {self.name} is not there yet, it waits for: {self.waits_for}")


@cache
def presets() -> Mapping[str, Preset]:
    """Name -> preset."""
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    texts = ("name", "family", "status", "experts", "special", "waits_for")
    return {
        row["name"]: Preset(
            name=row["name"],
            family=row["family"],
            waits_for=row["waits_for"],
            numbers={key: float(row[key]) for key in row if key not in texts and row[key]},
            experts=row["experts"],
            special=row["special"],
        )
        for row in rows
    }


def preset(name: str) -> Preset:
    """The preset of a name, whose case does not matter.

    Raises:
        ConfigError: none of that name, with the nearest.
    """
    known = {item.lower(): item for item in presets()}
    if name.lower() in known:
        return presets()[known[name.lower()]]
    close = nearest(name.lower(), known)
    hint = f"did you mean {known[close]}?" if close else "`slime models list` shows all"
    raise ConfigError(f"unknown model {name}: {hint}")
