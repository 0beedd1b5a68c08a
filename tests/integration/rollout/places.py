"""A store and the rollout workers that come and go at it, on a real engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from slime_core.config.loading import load_config
from slime_core.rollout.settings import RolloutSettings
from slime_core.rollout.worker import RolloutWorker
from slime_core.sample import Sample
from slime_core.store.backend import open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.seal import Seal, open_groups, read_seal

BASE = {"num_rollout": 4, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "store_fsync": False}


class Place:
    """A run's store, one engine, and settings on top of the quickstart's."""

    def __init__(
        self, folder: Path, url: str, source: str = "configs/quickstart.yaml", **overrides: Any
    ) -> None:
        self._source = source
        self.folder = folder
        self.backend = open_backend(str(folder / "store" / "r"))
        self.cache = NodeCache(self.backend)
        self.overrides = {**BASE, "eval_interval": None, "eval_config": None, **overrides}
        self._url = url
        self._closing: list[asyncio.Task[None]] = []

    def worker(self) -> RolloutWorker:
        config = load_config(self._source, self.overrides)
        log = self.folder / "log"
        store = str(self.folder / "store")
        return RolloutWorker(RolloutSettings(config, "r", store, self.folder, log))

    async def ready(self, epoch: int = 0) -> RolloutWorker:
        """A new owner's worker, with its gate open."""
        worker = self.worker()
        await worker.setup()
        self._closing.append(close_at_the_end(worker))
        await worker.fence(epoch)
        await worker.set_engines([self._url])
        await worker.open_gate()
        return worker

    async def segment(self, worker: RolloutWorker, number: int, epoch: int = 0) -> Seal:
        """Draws, generates and seals a segment."""
        await worker.sample(epoch, number)
        await worker.generate(epoch, number)
        return self.seal(number)

    def seal(self, number: int) -> Seal:
        seal = read_seal(self.backend, number)
        assert seal is not None
        return seal

    def rows(self, seal: Seal) -> dict[tuple[int, str], list[Sample]]:
        """(group id, verdict) -> samples."""
        files = open_groups(self.cache, list(seal.groups))
        entries = {(g.entry.group_id, g.entry.attempt): g.entry.verdict for g in seal.groups}
        return {
            (key[0], entries[key]): file.rows(batch).to_samples()
            for key, (file, batch) in files.items()
        }

    def graders(self, seal: Seal) -> list[str | None]:
        """The grader digest of every row."""
        files = open_groups(self.cache, list(seal.groups))
        return [one for f, batch in files.values() for one in f.rows(batch).texts("grader_digest")]


def close_at_the_end(worker: RolloutWorker) -> asyncio.Task[None]:
    """Leaves no connection, server or process of a worker behind when its loop ends, which cancels
    this task. The caller keeps it."""

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await worker._gate.aclose()
            await worker._gateway.close()
            await worker._hub.close()

    return asyncio.create_task(waits())
