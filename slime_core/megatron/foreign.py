"""Weights from checkpoints that Megatron-LM or slime have written (torch_dist).

Nothing about such a folder was ever signed, and parts of the format are pickles, which may run
anything when they are read. So `common.pt` (arguments, iteration, random states) is not read at
all, the index only after every name in it was found to belong to a plain index, and tensors by
torch's own reader of tensors.
"""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any, cast

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.base import LoadCommonStrategy
from torch.distributed.checkpoint.api import CheckpointException

from slime_core.errors import ConfigError
from slime_core.megatron import parallel
from slime_core.megatron.model import PolicyModel
from slime_core.megatron.together import first_failure, together
from slime_core.weights.megatron_folder import iteration_folder

_INDEX = ".metadata"
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


def read_weights(model: PolicyModel, checkpoint: str) -> None:
    """Reads the weights of a Megatron checkpoint into the model, in any layout. A collective.

    Args:
        checkpoint: its folder, with latest_checkpointed_iteration.txt, or one iteration's.

    Raises:
        ConfigError: it is no torch_dist checkpoint of this model, or its index holds more than an
            index needs.
    """
    folder = iteration_folder(Path(checkpoint))
    together(f"checkpoint {folder}", lambda: check_index(folder))
    metadata = {"dp_cp_group": parallel.replica_group()}
    content: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    try:
        loaded = dist_checkpointing.load(content, str(folder), common_strategy=_NoCommon())
    except (CheckpointingException, CheckpointException, KeyError, ValueError) as error:
        said = first_failure(error) if isinstance(error, CheckpointException) else str(error)
        raise ConfigError(f"{folder} does not hold the weights of this model: {said}") from error
    model.load_state_dict(cast(dict[str, Any], loaded)["model"])


def check_index(folder: Path) -> None:
    """Looks at a checkpoint's format and index without running anything of them.

    Raises:
        ConfigError: another format, no index, or one that names what does not belong there.
    """
    try:
        about = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
        data = (folder / _INDEX).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is no torch_dist checkpoint: {error}") from error
    backend = about.get("sharded_backend") if isinstance(about, dict) else None
    if backend != "torch_dist":
        raise ConfigError(f"{folder} is a checkpoint of format {backend!r}; torch_dist is read")
    try:
        _PlainIndex(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / _INDEX} is no index of a checkpoint: {error}") from error


class _PlainIndex(pickle.Unpickler):
    """Makes nothing but what an index consists of."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class _NoCommon(LoadCommonStrategy):
    """Leaves common.pt alone."""

    def load_common(self, checkpoint_dir: Any) -> dict[str, Any]:
        return {}

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: Any) -> Any:
        return sharded_objects_state_dict

    def load_sharded_metadata(self, checkpoint_dir: Any) -> Any:
        return {}

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        return

    def check_version_compatibility(self, loaded_version: Any) -> None:
        return
