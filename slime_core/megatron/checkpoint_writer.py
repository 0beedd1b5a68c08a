"""Writing torch_dist checkpoints inside the trainer process, in three steps.

Megatron's own writer forks the trainer for each file and starts a manager process, which is slow
for small models and unsafe in a process with threads. The format is torch's either way, so the
plan and names stay Megatron's and only the writing is torch's own.

Planning and the end are collectives of the training thread; what takes long, the writing between
them, is not, so it may run beside training. An error of one rank becomes one of all at the next
collective, so nobody waits for a rank that gave up.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict
from torch.futures import Future

from slime_core.errors import TrainerError
from slime_core.megatron import parallel
from slime_core.megatron.together import first_failure, together

FORMAT, FORMAT_VERSION = "torch_dist", 1


class StagedSave:
    """One folder of a checkpoint: planned by all ranks, then written by each for itself.

    Args:
        content: a sharded state dict.
        folder: exists and is empty.
        copied: keep copies of the tensors, so that training may go on before they are written.
    """

    def __init__(self, content: dict[str, Any], folder: Path, *, copied: bool) -> None:
        """A collective.

        Raises:
            TrainerError: some rank could not plan its part.
        """
        self.folder = folder
        sharded, common = save_preprocess(content)
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            cast(dict[str, Any], sharded), True
        )
        self._common = copy.deepcopy(common)
        self._writer = _PlannedWriter(folder, copied)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        try:
            save_state_dict(
                mcore_to_pyt_state_dict(by_key, False),
                storage_writer=self._writer,
                planner=planner,
            )
        except CheckpointException as error:  # raised on every rank, and no Exception
            raise TrainerError(
                f"checkpoint {folder} cannot be planned: {first_failure(error)}"
            ) from error
        self._results: list[Any] = []

    def write(self) -> None:
        """Writes this rank's files. No collective; any thread may call it.

        Raises:
            OSError: the disk is full, for example.
        """
        self._results = self._writer.write_planned()

    def finish(self) -> None:
        """Writes the index on the first rank, after every rank has written. A collective.

        Raises:
            TrainerError: the index cannot be written.
        """
        results = parallel.gather_objects(self._results)
        together(f"the index of {self.folder}", lambda: self._write_index(results))

    def _write_index(self, results: list[list[Any]]) -> None:
        if dist.get_rank():
            return
        self._writer.write_index(results)
        torch.save(self._common, self.folder / COMMON_STATE_FNAME)
        save_config(CheckpointingConfig(FORMAT, FORMAT_VERSION), str(self.folder))


class _Kept(DefaultSavePlanner):
    """Answers the writer from what was read off the model at planning."""

    def __init__(self, items: dict[Any, Any]) -> None:
        super().__init__()
        self._items = items

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The tensor or bytes of an item."""
        return self._items[write_item.index]


class _PlannedWriter(FileSystemWriter):
    """Keeps the plan and the data where torch would write, and writes when it is told to."""

    def __init__(self, folder: Path, copied: bool) -> None:
        super().__init__(folder)
        self._copied = copied
        self._plan: SavePlan | None = None
        self._kept = _Kept({})
        self._metadata: Any = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[Any]]:
        """Called by torch on every rank."""
        self._plan = plan
        self._kept = _Kept({item.index: self._keep(planner, item) for item in plan.items})
        done: Future[list[Any]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Called by torch on the first rank."""
        self._metadata = metadata

    def write_planned(self) -> list[Any]:
        assert self._plan is not None
        done = super().write_data(self._plan, self._kept)
        self._kept = _Kept({})
        return cast(list[Any], done.value())

    def write_index(self, results: list[list[Any]]) -> None:
        super().finish(self._metadata, results)

    def _keep(self, planner: SavePlanner, item: WriteItem) -> Any:
        data = planner.resolve_data(item)
        if not isinstance(data, torch.Tensor):
            return data
        return data.detach().to("cpu", copy=True) if self._copied else data.detach()
