"""A checkpoint in the making: staged by all ranks, written by each, then finished by all.

The folder has another name until it is complete, so half of it is never taken for one.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist

from slime_core.errors import FullError, TrainerError
from slime_core.megatron.checkpoint_writer import StagedSave
from slime_core.megatron.together import together

PARTIAL = ".partial"
Stage = Callable[[Path, bool], StagedSave]
"""Stages content into a folder; True keeps copies of its tensors."""


class PendingSave:
    """A checkpoint whose files are not all written.

    Args:
        directory: a path that does not exist yet.
        own: stages the policy.
        parts: further folders inside it, by name, and what stages each.
        beside: write in a thread of its own, so that training can go on.
    """

    def __init__(
        self, directory: str, own: Stage, parts: Mapping[str, Stage], *, beside: bool
    ) -> None:
        """Stages everything. A collective.

        Raises:
            TrainerError: the directory exists already or cannot be made.
        """
        self.target = Path(directory)
        self._partial = self.target.with_name(self.target.name + PARTIAL)
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        folders = [self._partial, *(self._partial / name for name in parts)]
        together(f"checkpoint {self.target}", lambda: self._make(folders))
        stages = [own, *parts.values()]
        self._staged = [
            stage(folder, beside) for stage, folder in zip(stages, folders, strict=True)
        ]
        if beside:
            self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
            self._thread.start()

    @property
    def reads_weights(self) -> bool:
        """Whether its files are yet to be written from the weights themselves, not from copies."""
        return self._thread is None

    @property
    def written(self) -> bool:
        """Whether this rank's files are written, or their writing has failed."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self, timeout_s: float) -> None:
        """Makes the folder final. A collective.

        Args:
            timeout_s: how long the writing may still take.

        Raises:
            TrainerError: a rank could not write its files; they are removed.
            FullError: there was no space for them; they are removed.
        """
        try:
            together(f"checkpoint {self.target}", lambda: self._await(timeout_s))
            for staged in self._staged:
                staged.finish()
        except (TrainerError, FullError):
            if dist.get_rank() == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
            raise
        together(f"checkpoint {self.target}", self._rename)

    def _make(self, folders: list[Path]) -> None:
        if dist.get_rank():
            return
        if self.target.exists():
            raise TrainerError("exists already; choose another name")
        shutil.rmtree(self._partial, ignore_errors=True)
        for folder in folders:
            folder.mkdir(parents=True)

    def _write(self) -> None:
        try:
            for staged in self._staged:
                staged.write()
        except Exception as error:
            self._failure = error  # told to all ranks in `finish`

    def _await(self, timeout_s: float) -> None:
        if self._thread is None:
            self._write()
        else:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TrainerError(f"its files were not written within {timeout_s:.0f} s")
        if self._failure is not None:
            raise self._failure

    def _rename(self) -> None:
        if dist.get_rank() == 0:
            self._partial.rename(self.target)
