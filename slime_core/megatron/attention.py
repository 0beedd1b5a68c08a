"""Causal attention over packed sequences: torch's varlen kernel on CUDA, padded SDPA elsewhere."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from slime_core.errors import ConfigError, TrainerError
from slime_core.megatron import parallel
from slime_core.megatron.padded import PaddedGroup, padded_attention, plan_groups
from slime_core.megatron.rotary import rotate
from slime_core.megatron.zigzag import ChunkGroup, chunk_attention, plan_chunks


@cache
def _varlen_takes_gqa() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    params: PackedSeqParams,
    scale: float | None,
) -> torch.Tensor:
    """Causal attention by torch's varlen kernel: CUDA, float16 or bfloat16.

    Shapes as in `padded_attention`. torch 2.11 groups heads by itself, 2.13 wants to be told.
    """
    from torch.nn.attention.varlen import varlen_attn

    extra: dict[str, Any] = {}
    if query.size(1) != key.size(1) and _varlen_takes_gqa():
        extra["enable_gqa"] = True
    out = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        params.cu_seqlens_q,
        params.cu_seqlens_kv,
        params.max_seqlen_q,
        params.max_seqlen_kv,
        scale=scale,
        window_size=(-1, 0),
        **extra,
    )
    assert isinstance(out, torch.Tensor)  # a pair only where the log-sum-exp is asked for
    return out


@dataclass
class Pack(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what all layers share.

    Attributes:
        cos, sin: [t, 1, d / 2], rotary tables of every token of this rank.
        groups: plan of the padded calls, made by the first layer that needs it.
        chunks: the same for context-parallel ranks.
    """

    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    groups: list[PaddedGroup] | None = None
    chunks: list[ChunkGroup] | None = None


class PackedAttention(MegatronModule):
    """Core attention of a layer, rotary positions included. Takes a Pack only."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ConfigError("attention dropout is not supported; set attention_dropout to 0")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """[t, heads, d] and [t, kv heads, d] twice -> [t, heads * d], t of this rank."""
        if not isinstance(packed_seq_params, Pack):
            raise TrainerError("the model was run without a Pack; use PolicyModel.pack")
        cos, sin = packed_seq_params.cos, packed_seq_params.sin
        assert cos is not None and sin is not None
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if self.config.context_parallel_size > 1:
            out = self._over_ranks(query, key, value, packed_seq_params)
        elif query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
            out = varlen_attention(query, key, value, packed_seq_params, self.softmax_scale)
        else:
            groups = plan_of(packed_seq_params, query.device)
            out = padded_attention(query, key, value, groups, self.softmax_scale)
        return out.reshape(out.size(0), -1)

    def _over_ranks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: Pack
    ) -> torch.Tensor:
        """Attention of this context-parallel rank's chunks to the keys of all ranks."""
        group = parallel.context_group()
        if pack.chunks is None:
            assert pack.cu_seqlens_q is not None
            starts = pack.cu_seqlens_q.cpu().numpy()
            pack.chunks = plan_chunks(starts, group.size(), group.rank(), query.device)
        pair = torch.stack((key, value), 1).contiguous()  # [t, 2, kv heads, d]
        # Its gradient is the sum over the ranks of what each one's queries need.
        gathered = gather_from_sequence_parallel_region(
            pair, tensor_parallel_output_grad=True, group=group
        )
        key, value = gathered.unbind(1)
        return chunk_attention(query, key, value, pack.chunks, self.softmax_scale)


def plan_of(pack: Pack, device: torch.device) -> list[PaddedGroup]:
    """The plan of a pack, kept on it: all layers and the backward pass share it."""
    if pack.groups is None:
        cu_seqlens = pack.cu_seqlens_q
        assert cu_seqlens is not None
        pack.groups = plan_groups(cu_seqlens.tolist(), device)
    return pack.groups
