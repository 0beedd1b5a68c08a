"""Presets: the dimensions of known models, as Megatron's options.

The data lies in models.csv. configs/models/*.yaml is made from it by
`slime models export --all configs/models --format yaml`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from slime_core.errors import ConfigError
from slime_core.near import nearest

DATA = Path(__file__).with_suffix(".csv")
ALWAYS = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "use_rotary_position_embeddings": True,
    "group_query_attention": True,
}
EXPERTS = re.compile(r"E(\d+) top(\d+) f(\d+)")
"""Experts, experts a token goes to, width of one."""
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "sn": {"post_self_attn_layernorm": True, "post_mlp_layernorm": True},
    "ri": {"rotary_interleaved": True},
    "rot%=0.5": {"rotary_percent": 0.5},
    "smx": {"moe_router_score_function": "softmax"},
}
"""slime's short hand -> Megatron's options; all else of it is not part of a described model."""
Status = Literal["works", "described", "later"]


@dataclass(frozen=True)
class Preset:
    """One row.

    Attributes:
        name: as slime's model scripts are called.
        family: model_type of config.json.
        status: works, or described (all dimensions, while training waits), or later.
        waits_for: what the trainer lacks; empty where it can train the model.
        numbers: column -> number, where the model has one.
        experts, special: what else the later ones have, in slime's short hand.
    """

    name: str
    family: str
    status: Status
    waits_for: str
    numbers: Mapping[str, float]
    experts: str
    special: str

    def options(self) -> dict[str, Any]:
        """Megatron's options by name.

        Raises:
            ConfigError: a model whose form is not described yet.
        """
        if self.status == "later":
            self.require_trainable()
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
        if experts := EXPERTS.match(self.experts):
            names = ("num_experts", "moe_router_topk", "moe_ffn_hidden_size")
            found |= zip(names, map(int, experts.groups()), strict=True)
        for mark in self.special.split(","):
            found |= SPECIAL.get(mark, {})
        return found

    def parameters(self) -> int:
        """Number of parameters.

        Raises:
            ConfigError: a model whose form is not described yet.
        """
        o = self.options()
        hidden, width = o["hidden_size"], o["kv_channels"]
        q, kv = o["num_attention_heads"] * width, o["num_query_groups"] * width
        attention = 2 * hidden * q + 2 * hidden * kv + (q + 2 * kv) * o["add_qkv_bias"]
        norms = 2 * width * o["qk_layernorm"] + hidden * (4 if "post_mlp_layernorm" in o else 2)
        if experts := o.get("num_experts"):
            mlp = experts * (3 * hidden * o["moe_ffn_hidden_size"] + hidden)
        else:
            mlp = 3 * hidden * o["ffn_hidden_size"]
        ends = o["vocab_size"] * hidden * (1 + o["untie_embeddings_and_output_weights"]) + hidden
        return o["num_layers"] * (attention + norms + mlp) + ends

    def yaml(self) -> str:
        """A configuration to be extended."""
        head = (
            f"# {self.name}: {self.parameters():,} parameters. Where config.json of hf_checkpoint\n"
            "# says otherwise, every difference is an error.\n"
        )
        if self.waits_for:
            head += f"# Training waits for: {self.waits_for}.\n"
        return head + yaml.safe_dump({"megatron": self.options()}, sort_keys=False)

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

    def require_trainable(self) -> None:
        """Refuses a model that the trainer cannot train yet.

        Raises:
            ConfigError: says what it waits for.
        """
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
            status=cast(Status, row["status"]),
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
