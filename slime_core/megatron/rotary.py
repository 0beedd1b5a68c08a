"""Rotary positions for packed sequences: one table a pack, one rotation for all its tokens.

Megatron's own code for packed sequences launches its kernels once per sequence and layer, which
leaves a GPU waiting; here positions are looked up once and shared by all layers.
"""

from __future__ import annotations

import torch

from slime_core.errors import ConfigError
from slime_core.weights.tables import ModelShape


def rotary_frequencies(checkpoint: str, shape: ModelShape) -> torch.Tensor:
    """float32 [head_dim / 2]: inverse frequencies, equal to transformers' for every scaling.

    Raises:
        ConfigError: a scaling that also rescales attention, or that transformers does not know.
    """
    if shape.rope_type == "default":
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.int64).float() / shape.head_dim
        return 1.0 / (shape.rope_theta**exponents)
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if shape.rope_type not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(f"rope_type {shape.rope_type!r} of {checkpoint} is not known")
    inverse, attention_factor = ROPE_INIT_FUNCTIONS[shape.rope_type](
        AutoConfig.from_pretrained(checkpoint), torch.device("cpu")
    )
    if attention_factor != 1.0 or shape.rope_type in ("dynamic", "longrope"):
        raise ConfigError(f"rope_type {shape.rope_type!r} of {checkpoint} is not supported")
    return inverse.float()


def rotary_tables(
    inverse_frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine at each token, computed in float32.

    Args:
        inverse_frequencies: float32 [d / 2]
        positions: int64 [t], starting at 0 in each sequence.
        dtype: of queries and keys.

    Returns:
        Two [t, 1, d / 2].
    """
    angles = positions.float()[:, None] * inverse_frequencies
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the two halves of each head against each other. [t, heads, d] -> [t, heads, d]"""
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
