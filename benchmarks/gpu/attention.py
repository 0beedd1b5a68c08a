"""Packed causal attention: torch's varlen kernel, padded SDPA and SDPA a sequence, compared."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.packed_seq_params import PackedSeqParams
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.ceilings import median_ms
from benchmarks.gpu.host import keep, parser, show
from slime_core.megatron.attention import varlen_attention
from slime_core.megatron.padded import padded_attention, plan_groups

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
TOKENS = 16384
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def packs() -> dict[str, list[int]]:
    """Name -> sequence lengths, 16384 tokens each."""
    generator = torch.Generator().manual_seed(7)
    mixed: list[int] = []
    while (left := TOKENS - sum(mixed)) > 0:
        mixed.append(min(left, int(torch.randint(64, 1024, (), generator=generator))))
    return {"4 x 4096": [4096] * 4, "64 x 256": [256] * 64, f"{len(mixed)} x 64-1024": mixed}


def inputs(tokens: int, seed: int) -> Tensors:
    """Random query [t, heads, d], key and value [t, kv heads, d] in bf16."""
    torch.manual_seed(seed)

    def one(heads: int) -> torch.Tensor:
        made = torch.randn(tokens, heads, HEAD_DIM, device="cuda").bfloat16()
        return made.requires_grad_()

    return one(HEADS), one(KV_HEADS), one(KV_HEADS)


def by_sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: list[int]) -> torch.Tensor:
    """SDPA of each sequence by itself; [t, heads, d]."""
    parts = []
    for a, b in pairwise(cu):
        rows = [x[a:b].transpose(0, 1)[None] for x in (q, k, v)]
        out = functional.scaled_dot_product_attention(
            rows[0], rows[1], rows[2], is_causal=True, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def gradients(out: torch.Tensor, given: Tensors, weight: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(out, given, weight.to(out.dtype)))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def compare(lengths: list[int], seed: int) -> dict[str, Any]:
    """Errors against float32 SDPA of each sequence, and medians in milliseconds."""
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    starts = torch.tensor(cu, dtype=torch.int32, device="cuda")
    params = PackedSeqParams(
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    groups = plan_groups(cu, torch.device("cuda"))
    given = inputs(cu[-1], seed)
    weight = torch.randn(cu[-1], HEADS, HEAD_DIM, device="cuda")
    ways: dict[str, Any] = {
        "varlen": lambda q, k, v: varlen_attention(q, k, v, params, None),
        "padded": lambda q, k, v: padded_attention(q, k, v, groups, None),
        "by sequence": lambda q, k, v: by_sequence(q, k, v, cu),
    }
    exact: Any = tuple(x.detach().float().requires_grad_() for x in given)
    with sdpa_kernel(SDPBackend.MATH):
        reference = by_sequence(exact[0], exact[1], exact[2], cu)
        reference_grads = gradients(reference, exact, weight)
    result: dict[str, Any] = {}
    for name, way in ways.items():
        out = way(*given)
        errors = [relative(out, reference)]
        grads = gradients(out, given, weight)
        errors += [relative(g, r) for g, r in zip(grads, reference_grads, strict=True)]
        with torch.no_grad():
            forward = median_ms(lambda way=way: way(*given))
        both = median_ms(lambda way=way: gradients(way(*given), given, weight))
        result[name] = {"errors": errors, "forward_ms": forward, "both_ms": both}
    return result


def main() -> None:
    options = parser(__doc__).parse_args()
    results = {name: compare(lengths, seed) for seed, (name, lengths) in enumerate(packs().items())}
    keep(options.out, "attention", {"packs": results})
    rows: list[tuple[str, Any]] = []
    for pack, ways in results.items():
        for way, found in ways.items():
            worst = max(found["errors"])
            times = f"{found['forward_ms']:.2f} / {found['both_ms']:.2f} ms"
            rows.append((f"{pack}, {way}: forward / both; worst error", f"{times}; {worst:.1e}"))
    show(rows)


if __name__ == "__main__":
    main()
