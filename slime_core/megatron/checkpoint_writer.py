"""Writing torch_dist checkpoints inside the trainer process.

Megatron's own writer forks the trainer for each file and starts a manager process, which is slow
for small models and unsafe in a process with threads. The format is torch's either way, so the
plan and names stay Megatron's and only the writing is torch's synchronous one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict


class InProcessSaveStrategy(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written without other processes."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Writes this rank's shards; rank 0 also writes the index. A collective."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
        )
        save_state_dict(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=planner,
        )
