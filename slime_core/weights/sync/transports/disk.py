"""Weights through a folder that trainer and engines share: safetensors in Hugging Face's layout."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from slime_core.engines.client import EngineClient

log = logging.getLogger(__name__)
Export = Callable[[str, str], Awaitable[dict[str, Any]]]
Written = Callable[[str], Awaitable[None]]


class DiskTransport:
    """Exports each version into a folder of its own and lets every engine load it.

    Args:
        folder: shared by the trainer's rank 0 and all engines.
        export: (directory, version) -> what was written; rank 0 writes a complete folder.
        written: called with each folder that is complete, before any engine loads it.
    """

    def __init__(self, folder: Path, export: Export, written: Written | None = None) -> None:
        self._folder = folder
        self._export = export
        self._written = written

    async def prepare(self, version: str) -> None:
        await self._export(str(self._folder / version), version)
        if self._written is not None:
            await self._written(str(self._folder / version))

    async def send(self, client: EngineClient, version: str) -> None:
        folder = str(self._folder / version)
        await client.update_weights_from_disk(folder, version, flush_cache=False)

    async def finish(self, version: str) -> None:
        """Removes the folders of older versions."""
        await asyncio.to_thread(self._remove_all_but, version)

    def _remove_all_but(self, version: str) -> None:
        for folder in self._folder.iterdir():
            if not folder.is_dir() or folder.name == version:
                continue
            try:
                shutil.rmtree(folder)
            except OSError as error:  # the engines serve already; only space is lost
                log.warning("old weights %s cannot be removed: %s", folder, error)
