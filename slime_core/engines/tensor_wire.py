"""SGLang's wire form of tensors: base64 of a pickle that refers to shared memory.

The sender writes what torch's multiprocessing pickler writes (SGLang's MultiprocessingSerializer
does the same). The reader accepts a short list of torch's rebuild functions and nothing else, so
a payload cannot run code. Read in SGLang 0.5.17: `load_format` null carries a list of (name,
tensor), "flattened_bucket" a dict of one uint8 tensor and a list of metadata.
"""

from __future__ import annotations

import base64
import binascii
import copyreg
import io
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import torch
import torch.multiprocessing.reductions as reductions

from slime_core.errors import EngineError

FLATTENED_BUCKET = "flattened_bucket"
NamedTensors = list[tuple[str, torch.Tensor]]


class WireError(EngineError):
    """A tensor payload that is damaged, or holds something that is not a tensor."""


@dataclass
class BucketEntry:
    """Where one tensor lies in a flattened bucket; SGLang's FlattenedTensorMetadata.

    Attributes:
        start_idx: first byte.
        end_idx: one past the last byte.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


# The C classes cannot restrict BUILD or write a global that is not importable here.
_PythonPickler: Any = vars(pickle)["_Pickler"]
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]
_BUCKET_MODULE = "sglang.srt.weight_sync.tensor_bucket"
_BUCKET_CLASS = "FlattenedTensorMetadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch.multiprocessing.reductions", name): getattr(reductions, name)
    for name in (
        "rebuild_tensor",
        "rebuild_storage_filename",
        "rebuild_storage_empty",
        "rebuild_typed_storage",
        "rebuild_cuda_tensor",
    )
} | {
    ("torch", "Tensor"): torch.Tensor,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
    ("torch.storage", "UntypedStorage"): torch.storage.UntypedStorage,
    ("torch.storage", "TypedStorage"): torch.storage.TypedStorage,
    (_BUCKET_MODULE, _BUCKET_CLASS): BucketEntry,
}


class _TensorUnpickler(_PythonUnpickler):
    """Resolves allow-listed names only, and restricts the opcodes that could do more."""

    dispatch: ClassVar[dict[int, Any]] = dict(_PythonUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        allowed = _ALLOWED.get((module, name))
        if allowed is None and module == "torch":
            value = getattr(torch, name, None)
            allowed = value if isinstance(value, torch.dtype) else None
        if allowed is None:
            raise WireError(f"a tensor payload may not name {module}.{name}")
        return allowed

    def persistent_load(self, pid: Any) -> Any:
        raise WireError("a tensor payload may not hold persistent ids")

    def load_build(self) -> None:
        """Sets state on bucket metadata only: elsewhere BUILD could change torch itself."""
        state = self.stack.pop()
        entry = self.stack[-1]
        if type(entry) is not BucketEntry or type(state) is not dict:
            raise WireError(f"a tensor payload may not set the state of {type(entry).__name__}")
        vars(entry).update({str(key): value for key, value in state.items()})

    def load_extension(self) -> None:
        raise WireError("a tensor payload may not use pickle extensions")

    dispatch[pickle.BUILD[0]] = load_build
    for _code in (pickle.EXT1, pickle.EXT2, pickle.EXT4):
        dispatch[_code[0]] = load_extension


def serialize_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Writes (name, tensor) pairs for update_weights_from_tensor.

    CPU tensors are moved to named shared memory: keep them alive until the engine has answered.
    """
    return _dump([(name, tensor.detach()) for name, tensor in named])


@dataclass(frozen=True)
class FlatBucket:
    """Tensors laid one behind the other, for load_format "flattened_bucket".

    Keep it alive until every engine that was sent its `wire` has answered.

    Attributes:
        block: uint8 [bytes], a copy, on the tensors' device.
        entries: where each tensor lies.
    """

    block: torch.Tensor
    entries: tuple[BucketEntry, ...]

    def wire(self) -> str:
        """The payload: it names the block's shared memory or CUDA IPC handle."""
        if self.block.is_cuda:
            torch.cuda.synchronize(self.block.device)  # the reader has streams of its own
        return _dump({"flattened_tensor": self.block, "metadata": list(self.entries)})


def flatten(named: Sequence[tuple[str, torch.Tensor]]) -> FlatBucket:
    """Copies tensors of one device into one block."""
    if not named:
        raise EngineError("a tensor bucket must hold at least one tensor")
    parts = [tensor.detach().contiguous().flatten().view(torch.uint8) for _, tensor in named]
    entries, at = [], 0
    for (name, tensor), part in zip(named, parts, strict=True):
        end = at + part.numel()
        entries.append(BucketEntry(name, tensor.shape, tensor.dtype, at, end, part.numel()))
        at = end
    return FlatBucket(torch.cat(parts), tuple(entries))


def cut_buckets(named: Iterable[tuple[str, torch.Tensor]], most_bytes: int) -> Iterator[FlatBucket]:
    """Buckets of at most `most_bytes` each; a larger tensor gets one of its own."""
    waiting: list[tuple[str, torch.Tensor]] = []
    waiting_bytes = 0
    for name, tensor in named:
        size_bytes = tensor.numel() * tensor.element_size()
        if waiting and waiting_bytes + size_bytes > most_bytes:
            yield flatten(waiting)
            waiting, waiting_bytes = [], 0
        waiting.append((name, tensor))
        waiting_bytes += size_bytes
    yield flatten(waiting)


def serialize_bucket(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """The payload of one flat bucket of CPU tensors: its memory lives as long as this process."""
    return flatten(named).wire()


def parse_tensors(payload: str, load_format: str | None = None) -> NamedTensors:
    """Reads a payload into (name, tensor) pairs that share the sender's memory.

    Args:
        payload: base64 text.
        load_format: None (or "direct") for pairs, "flattened_bucket" for one block.

    Raises:
        WireError: not base64, not a pickle of tensors, or names anything else.
    """
    if load_format not in (None, "direct", FLATTENED_BUCKET):
        raise WireError(f"load_format {load_format!r} is not supported for tensors")
    try:
        raw = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise WireError(f"a tensor payload must be base64: {error}") from error
    try:
        content = _TensorUnpickler(io.BytesIO(raw)).load()
    except WireError:
        raise
    except Exception as error:  # a hostile stream can raise anything from inside pickle or torch
        raise WireError(f"a tensor payload cannot be read: {error!r}") from error
    return _split(content) if load_format == FLATTENED_BUCKET else _pairs(content)


def _dump(content: Any) -> str:
    shared = torch.multiprocessing.get_sharing_strategy()
    # File descriptors could be passed to child processes only; names reach any process.
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        buffer = io.BytesIO()
        _TensorPickler(buffer).dump(content)
    finally:
        torch.multiprocessing.set_sharing_strategy(shared)
    return base64.b64encode(buffer.getvalue()).decode()


class _TensorPickler(_PythonPickler):
    """Writes tensors by reference to shared memory, and BucketEntry under SGLang's name."""

    dispatch_table = copyreg.dispatch_table | ForkingPickler._extra_reducers  # pyright: ignore

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is BucketEntry:
            self.write(pickle.GLOBAL + f"{_BUCKET_MODULE}\n{_BUCKET_CLASS}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def _pairs(content: Any) -> NamedTensors:
    if not isinstance(content, list) or not all(
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], torch.Tensor)
        for pair in content
    ):
        raise WireError("a tensor payload must be a list of (name, tensor)")
    return [(name, tensor) for name, tensor in content]


def _split(content: Any) -> NamedTensors:
    flat = content.get("flattened_tensor") if isinstance(content, dict) else None
    entries = content.get("metadata") if isinstance(content, dict) else None
    if not isinstance(flat, torch.Tensor) or not isinstance(entries, list):
        raise WireError("a flattened bucket needs flattened_tensor and metadata")
    block = flat.contiguous().view(torch.uint8)
    named = []
    for entry in entries:
        if not isinstance(entry, BucketEntry):
            raise WireError("a flattened bucket's metadata must be FlattenedTensorMetadata")
        try:
            part = block[entry.start_idx : entry.end_idx]
            if entry.start_idx % entry.dtype.itemsize:
                part = part.clone()
            named.append((entry.name, part.view(entry.dtype).reshape(entry.shape)))
        except (AttributeError, RuntimeError, TypeError) as error:
            raise WireError(f"a flattened bucket's entry does not fit: {error}") from error
    return named
