"""Digests that prove what weights a trainer holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import xxhash

from slime_core.errors import TrainerError
from slime_core.megatron import parallel
from slime_core.megatron.chunks import Chunks, bound_entries, named_parameters, own_names
from slime_core.megatron.export import named_hf_tensors
from slime_core.weights.digest import tensor_bytes
from slime_core.weights.tables import ModelShape, bind

_CHUNK = 1 << 24


def weights_digest(
    chunks: Chunks, shape: ModelShape, role: str = "actor", *, trained: bool = False
) -> str:
    """64-bit digest of all weights in canonical order, as "<role>:<16 hex>". A collective.

    Data-parallel replicas hold the same weights, so only the first counts; other parallel sizes
    give another digest, like they give other bits.

    Raises:
        TrainerError: a weight is NaN or Inf; on all ranks.
    """
    parameters = named_parameters(chunks)
    own = own_names(chunks)
    entries = bound_entries(chunks, shape)
    apart = parallel.experts_apart()
    hashers = {expert: xxhash.xxh3_64() for expert in ((False, True) if apart else (False,))}
    for name in (*entries, *own):
        parameter = parameters[name]
        hasher = hashers[apart and name in entries and entries[name].expert is not None]
        if parameter.is_cuda:
            hasher.update(fingerprint(parameter).to_bytes(8, "little"))
        else:
            hasher.update(tensor_bytes(parameter))
    mine = [(parallel.replica_rank(expert=e), hashers[e].hexdigest()) for e in hashers]
    gathered = parallel.gather_objects((mine, _not_finite(parameters)))
    _refuse({name for _, names in gathered for name in names}, role, trained=trained)
    shards = [shard for shards, _ in gathered for shard in shards]
    counted = [digest for rank, digest in shards if rank == 0]
    if len(counted) == 1:
        return f"{role}:{counted[0]}"
    return f"{role}:{xxhash.xxh3_64_hexdigest(''.join(counted).encode())}"


def _refuse(broken: set[str], role: str, *, trained: bool) -> None:
    """Raises TrainerError if there are weights with NaN or Inf."""
    if not broken:
        return
    why = (
        "nothing was recorded of them, and the last checkpoint is sound. Gradients were finite, so "
        "look at the learning rate, and at functions of your own that write to weights"
        if trained
        else "so do the files that they were read from. Take another model, or another checkpoint"
    )
    raise TrainerError(
        f"{len(broken)} of the {role}'s weights hold NaN or Inf, such as {min(broken)}: {why}"
    )


@torch.no_grad()
def _not_finite(parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors with a NaN or an Inf: both reach a tensor's least or largest value."""
    names = [name for name, tensor in parameters.items() if tensor.numel()]
    if not names:
        return []
    ends = [torch.stack(torch.aminmax(parameters[name])).double() for name in names]
    sound = torch.stack(ends).isfinite().all(1).tolist()
    return [name for name, finite in zip(names, sound, strict=True) if not finite]


@torch.no_grad()
def digest_as_on_one_rank(chunks: Chunks, shape: ModelShape, undivided: ModelShape) -> str:
    """The digest that one rank with the policy's weights would give. A collective.

    It gathers all tensors, so it is for the start, where a run must be known in any layout.

    Args:
        shape: of the model, with the vocabulary padded for its tensor-parallel size.
        undivided: the same, padded for one rank.

    Raises:
        TrainerError: a weight is NaN or Inf; on all ranks.
    """
    gathered = parallel.gather_objects(_not_finite(named_parameters(chunks)))
    _refuse({name for names in gathered for name in names}, "actor", trained=False)
    hasher = xxhash.xxh3_64()
    tensors = named_hf_tensors(chunks, shape)
    for entry in bind(undivided):
        parts = [next(tensors)[1] for _ in entry.hf_names]
        hasher.update(tensor_bytes(entry.to_megatron(parts, 0, 1)))
    return f"actor:{hasher.hexdigest()}"


@torch.no_grad()
def fingerprint(tensor: torch.Tensor) -> int:
    """64-bit hash of a tensor's bits, computed where the tensor is.

    Sum over words of word * m(position) modulo 2^64, m odd and scattered: exact integer
    arithmetic, so the order of summation does not matter, and any single change shows.
    """
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous().reshape(-1).view(words)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=tensor.device) + 1
        # Two rounds of multiply and xor-shift scatter the position (after splitmix64).
        mixed = place * -7046029254386353131
        mixed = (mixed ^ (mixed >> 31)) * -4658895280553007687
        total += (part * ((mixed ^ (mixed >> 29)) | 1)).sum()
    return int(total.item()) & 0xFFFF_FFFF_FFFF_FFFF
