"""The policy as a Hugging Face checkpoint that an engine can load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from slime_core.errors import TrainerError
from slime_core.megatron import parallel
from slime_core.megatron.chunks import Chunks
from slime_core.megatron.model import local_entries
from slime_core.megatron.settings import TrainerSettings
from slime_core.weights.digest import TensorsDigest
from slime_core.weights.hf_files import INDEX, SINGLE
from slime_core.weights.tables import BoundEntry, ModelShape, bind

# What an engine or a tokenizer may look for besides config.json and the weights.
_SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
Place = tuple[str, int | None]


@torch.no_grad()
def named_hf_tensors(chunks: Chunks, shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor under its Hugging Face name, in checkpoint order, in the training dtype.

    A collective: all ranks iterate to the end, and all get every tensor. A tensor may be a view
    of a parameter; copy it if it must outlive the next step.
    """
    local: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        parameters = dict(chunk.named_parameters())
        for name, entry in local_entries(chunk, shape).items():
            if entry.place != "first" or chunk.pre_process:
                local[entry.megatron] = parameters[name]
    like = next(chunks[0].parameters())
    stage = parallel_state.get_pipeline_model_parallel_rank()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    owners: dict[Place, int] = {}
    places = {(entry.place, entry.layer) for entry in bind(shape) if entry.megatron in local}
    for other, held in parallel.gather_pipeline((stage, places)):
        owners.update(dict.fromkeys(held, other))
    experts = parallel.expert_group()
    for entry in bind(shape):
        owner = owners[entry.place, entry.layer]
        shards = _tensor_parallel_shards(local.get(entry.megatron), entry)
        named = [] if shards is None else entry.to_hf(shards)
        if entry.expert is not None and experts.size() > 1 and owner == stage:
            holder = entry.expert * experts.size() // (shape.num_experts or 1)
            named = list(_from_rank(holder, experts, entry, named, like))
        if stages == 1:
            yield from named
        else:
            yield from _from_rank(owner, parallel.pipeline_group(), entry, named, like)


def _tensor_parallel_shards(
    parameter: torch.Tensor | None, entry: BoundEntry
) -> list[torch.Tensor] | None:
    if parameter is None:
        return None
    data = parameter.detach()
    group = parallel.tensor_group(expert=entry.expert is not None)
    if group.size() == 1:
        return [data]
    shards = [torch.empty_like(data) for _ in range(group.size())]
    dist.all_gather(shards, data.contiguous(), group=group)
    return shards


def _from_rank(
    owner: int,
    group: dist.ProcessGroup,
    entry: BoundEntry,
    named: list[tuple[str, torch.Tensor]],
    like: torch.Tensor,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Hands one rank's tensors to the others of a group."""
    source = dist.get_global_rank(group, owner)
    have = dict(named)
    for name, size in zip(entry.hf_names, entry.hf_shapes, strict=True):
        tensor = have.get(name)
        if tensor is None:
            tensor = torch.empty(size, dtype=like.dtype, device=like.device)
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=source, group=group)
        yield name, tensor


def export_hf(
    chunks: Chunks,
    shape: ModelShape,
    settings: TrainerSettings,
    directory: str,
    version: str,
    max_file_bytes: int = 5 * 10**9,
) -> dict[str, Any]:
    """Writes safetensors, config.json, generation_config.json and tokenizer files.

    Rank 0 writes into a folder beside the target and renames it, so a reader sees all or nothing;
    a folder already there is replaced. A collective.

    Args:
        directory: the target folder.
        version: weight version, kept in the safetensors' metadata.
        max_file_bytes: a larger model is cut into several files with an index.

    Returns:
        {"digest": xxh3-128 over names, dtypes, shapes and bytes, "bytes", "tensors"}.

    Raises:
        TrainerError: the folder cannot be written (for example a full disk).
    """
    tensors, digest, count = named_hf_tensors(chunks, shape), TensorsDigest(), 0
    writer, failure = None, ""
    try:
        if dist.get_rank() == 0:
            writer = _Writer(Path(directory), version, max_file_bytes)
        for name, tensor in tensors:
            count += 1
            if writer is not None:
                host = tensor.detach().to("cpu").contiguous()
                digest.add(name, host)
                writer.add(name, host)
        if writer is not None:
            writer.finish(Path(settings.hf_checkpoint), settings.dtype)
    except OSError as error:
        failure = f"weights cannot be written to {directory}: {error}"
        for _ in tensors:  # the other ranks still gather, and must not wait for this one
            pass
    total_bytes = 0 if writer is None else writer.total_bytes
    failure, hexdigest, total_bytes = parallel.from_first_rank(
        (failure, digest.hexdigest(), total_bytes)
    )
    if failure:
        raise TrainerError(failure)
    return {"digest": hexdigest, "bytes": total_bytes, "tensors": count}


class _Writer:
    """Collects tensors into files of bounded size inside a temporary folder."""

    def __init__(self, target: Path, version: str, max_file_bytes: int) -> None:
        self.target = target
        self.folder = target.with_name(f"{target.name}.partial")
        self.version = version
        self.max_file_bytes = max_file_bytes
        self.total_bytes = 0
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._files: list[list[str]] = []
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.max_file_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += size
        self.total_bytes += size

    def finish(self, source: Path, dtype: str) -> None:
        """Writes what is left, the index and the side files, and moves the folder into place."""
        self._flush()
        self._name_files()
        for name in _SIDE_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, self.folder / name)
        config = json.loads((source / "config.json").read_text())
        if str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch.") != dtype:
            config.pop("torch_dtype", None)
            config["dtype"] = dtype
        (self.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        old = self.target.with_name(f"{self.target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.target.exists():
            self.target.rename(old)
        self.folder.rename(self.target)
        shutil.rmtree(old, ignore_errors=True)

    def _flush(self) -> None:
        metadata = {"format": "pt", "weight_version": self.version}
        save_file(self._pending, self.folder / f"{len(self._files)}.safetensors", metadata)
        self._files.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _name_files(self) -> None:
        if len(self._files) == 1:
            (self.folder / "0.safetensors").rename(self.folder / SINGLE)
            return
        weight_map = {}
        for number, names in enumerate(self._files):
            final = f"model-{number + 1:05d}-of-{len(self._files):05d}.safetensors"
            (self.folder / f"{number}.safetensors").rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
