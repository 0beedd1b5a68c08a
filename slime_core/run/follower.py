"""Deciding in the owner's name, in a process the owner started."""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.errors import StaleOwnerError
from slime_core.run.epoch import newest_epoch
from slime_core.store.backend import Backend


@dataclass(frozen=True)
class Follower:
    """Acts for epoch `epoch` as long as no higher one exists."""

    backend: Backend
    epoch: int

    def guard(self) -> None:
        """Raises StaleOwnerError if a newer owner exists."""
        newest = newest_epoch(self.backend)
        if newest is not None and newest.epoch > self.epoch:
            raise StaleOwnerError(
                f"epoch {newest.epoch} owns the run now, this process acts for {self.epoch} and "
                "must stop"
            )
