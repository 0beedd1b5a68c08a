"""The decoder layer from Megatron's own modules, with our attention and norm put in."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from slime_core.megatron.attention import PackedAttention


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm. Unlike Megatron's torch norm it works with sequence parallelism."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        # Each rank sees other tokens; Megatron sums the gradients of marked parameters.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]"""
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class Router(TopKRouter):
    """Megatron's router. Its own product of input and weight needs Transformer Engine.

    Where routes are replayed, `router_replay` is a routes.RouterRoutes.
    """

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., experts], in the router's dtype."""
        wanted = {"fp32": torch.float32, "fp64": torch.float64}
        dtype = wanted.get(self.config.moe_router_dtype or "", input.dtype)
        return functional.linear(input.to(dtype), self.weight.to(dtype))


def decoder_spec(config: TransformerConfig, stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, or of one of its virtual stages, and the final norm."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    submodules = _submodules(layer)
    submodules.input_layernorm = RMSNorm
    submodules.pre_mlp_layernorm = RMSNorm
    if config.num_moe_experts is not None:
        _submodules(submodules.mlp).router = Router
    attention = _submodules(submodules.self_attention)
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    final_norm: Any = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, stage), layer_norm=final_norm
    )


def _submodules(spec: ModuleSpec | partial[Any]) -> Any:
    """Megatron 0.19 describes a layer with experts by a partial of its class."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
