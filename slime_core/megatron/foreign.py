"""Weights from checkpoints that Megatron-LM or slime have written (torch_dist).

Nothing about such a folder was ever signed, and parts of the format are pickles, which may run
anything when they are read. So the index is read by a reader that makes nothing but what an index
consists of, and written anew, with the tensors of this model alone, into a folder of our own beside
links to the files of tensors. Megatron reads that folder: every pickle there is ours, and the bytes
of tensors are read by torch's own reader of tensors. `common.pt` (arguments, iteration, random
states) and what else is not a tensor are never opened.
"""

from __future__ import annotations

import io
import json
import pickle
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from slime_core.errors import ConfigError
from slime_core.megatron import parallel
from slime_core.megatron.chunks import Chunks, load_states, sharded_states
from slime_core.megatron.together import first_failure, together
from slime_core.weights.megatron_folder import iteration_folder

_INDEX, _FORMAT = ".metadata", "metadata.json"
_PLAIN = {
    "builtins": {"set", "slice"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "torch": {
        "Size", "bfloat16", "bool", "contiguous_format", "float16", "float32", "float64", "int16",
        "int32", "int64", "int8", "preserve_format", "uint8",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    },
    "torch.serialization": {"_get_layout"},
}  # fmt: skip


def read_weights(chunks: Chunks, checkpoint: str) -> None:
    """Reads the weights of a Megatron checkpoint into the model, in any layout; a critic's head
    stays as it is. A collective.

    Args:
        checkpoint: its folder, with latest_checkpointed_iteration.txt, or one iteration's.

    Raises:
        ConfigError: it is no torch_dist checkpoint of this model, or its index holds more than an
            index needs.
    """
    metadata = {"dp_cp_group": parallel.replica_group()}
    sharded = sharded_states(chunks, metadata)
    # Objects are pickles. Layers have some, all empty, and do not ask for them back.
    _, tensors = extract_matching_values(sharded, lambda value: isinstance(value, ShardedObject))
    # A critic's head is no part of a policy's checkpoint.
    own = chunks[0].own_parameters
    content: dict[str, Any] = {
        part: {name: value for name, value in theirs.items() if name not in own}
        for part, theirs in cast(dict[str, Any], tensors).items()
    }
    with tempfile.TemporaryDirectory(prefix="slime-megatron-") as ours:
        folder = Path(ours)
        together(f"checkpoint {checkpoint}", lambda: _prepare(Path(checkpoint), content, folder))
        try:
            loaded = dist_checkpointing.load(content, ours)
        except (CheckpointingException, CheckpointException, KeyError, ValueError) as error:
            said = first_failure(error) if isinstance(error, CheckpointException) else str(error)
            raise _other_model(Path(checkpoint), said) from error
    load_states(chunks, cast(dict[str, Any], loaded), strict=not own)


def _prepare(checkpoint: Path, content: dict[str, Any], own: Path) -> None:
    """Fills our own folder with an index of the wanted tensors and links to where they lie."""
    folder = iteration_folder(checkpoint)
    index = read_index(folder)
    expanded, _, _ = load_preprocess(content)
    wanted = {
        tensor.key: tensor.global_shape
        for tensor in nested_values(expanded) if isinstance(tensor, ShardedTensor)
    }  # fmt: skip
    tensors, places = {}, {}
    for key, shape in wanted.items():
        found = index.state_dict_metadata.get(key)
        if type(found) is not TensorStorageMetadata or tuple(found.size) != tuple(shape):
            there = tuple(found.size) if type(found) is TensorStorageMetadata else "no tensor"
            raise _other_model(folder, f"{key} is {there} there and {tuple(shape)} here")
        tensors[key] = _plain_tensor(found)
    for at, info in index.storage_data.items():
        if at.fqn in tensors:
            places[MetadataIndex(at.fqn, _size(at.offset or ()), at.index)] = _plain_place(info)
    for name in {place.relative_path for place in places.values()}:
        (own / name).symlink_to((folder / name).resolve())
    with (own / _INDEX).open("wb") as file:
        pickle.dump(Metadata(tensors, None, places), file)
    (own / _FORMAT).write_text(json.dumps({"sharded_backend": "torch_dist",
                                           "sharded_backend_version": 1}))  # fmt: skip
    torch.save({}, own / COMMON_STATE_FNAME)


def _plain_tensor(found: TensorStorageMetadata) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(_size(c.offsets), _size(c.sizes)) for c in found.chunks]
    return TensorStorageMetadata(
        TensorProperties(dtype=found.properties.dtype), _size(found.size), chunks
    )


def _plain_place(info: _StorageInfo) -> _StorageInfo:
    name = str(info.relative_path)
    if Path(name).name != name or not name.endswith(".distcp"):
        raise ConfigError(f"the index of the checkpoint names {name!r} as a file of tensors")
    return _StorageInfo(name, int(info.offset), int(info.length))


def _size(numbers: Iterable[Any]) -> torch.Size:
    return torch.Size([int(number) for number in numbers])


def _other_model(folder: Path, said: str) -> ConfigError:
    return ConfigError(
        f"{folder} does not hold the weights of this model: {said}; give the checkpoint of the "
        "model that hf_checkpoint describes"
    )


def read_index(folder: Path) -> Metadata:
    """A checkpoint's index, made without running anything of it.

    Raises:
        ConfigError: another format, no index, or one that names what does not belong there.
    """
    try:
        about = json.loads((folder / _FORMAT).read_text(encoding="utf-8"))
        data = (folder / _INDEX).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is no torch_dist checkpoint: {error}") from error
    backend = about.get("sharded_backend") if isinstance(about, dict) else None
    if backend != "torch_dist":
        raise ConfigError(f"{folder} is a checkpoint of format {backend!r}; torch_dist is read")
    try:
        index = _PlainIndex(io.BytesIO(data)).load()
        if type(index) is not Metadata:
            raise pickle.UnpicklingError(f"it is a {type(index).__name__}")
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError,
            ValueError) as error:  # fmt: skip
        raise ConfigError(f"{folder / _INDEX} is no index of a checkpoint: {error}") from error
    return index


# The unpickler in Python, since the one in C lets nobody look at its instructions.
_Unpickler: Any = vars(pickle)["_Unpickler"]


class _PlainIndex(_Unpickler):
    """Makes nothing but what an index consists of."""

    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if name not in _PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)

    def load_build(self) -> None:
        """Sets the state of what was made, never of a class or function of torch's."""
        made = self.stack[-2]
        if isinstance(made, type) or type(made).__module__ not in _PLAIN:
            raise pickle.UnpicklingError(f"it changes {made!r:.80}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build
