"""How a trainer rank reads the batches of a run, in picklable form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_core.batching.types import TrainBatch
from slime_core.errors import StoreError
from slime_core.store.backend import open_backend
from slime_core.store.batch import Batch, read_batch
from slime_core.store.cache import NodeCache
from slime_core.store.load import load_train_batch


@dataclass(frozen=True)
class BatchSource:
    """Opens the run's store wherever it is used.

    Attributes:
        url: of the run's prefix.
        cache: node-local folder for parts of remote stores.
    """

    url: str
    fsync: bool
    cache: Path

    def load(self, iteration: int) -> tuple[Batch, TrainBatch]:
        """The sealed batch of an iteration and its columns.

        Raises:
            StoreError: it is not packed yet.
            DigestError: it, or a part it names, is damaged.
        """
        backend = open_backend(self.url, fsync=self.fsync)
        batch = read_batch(backend, iteration)
        if batch is None:
            raise StoreError(f"iteration {iteration} has no batch.json yet; pack it first")
        return batch, load_train_batch(backend, batch, NodeCache(backend, self.cache))
