"""Local folders of a workspace and of a run in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import ConfigError


@dataclass(frozen=True)
class RunPaths:
    """What is local to this machine. Everything durable stands in the store instead.

    Attributes:
        workspace: absolute folder that holds all runs.
        run_id: the run.
    """

    workspace: Path
    run_id: str

    @classmethod
    def create(cls, workspace: str | Path, run_id: str) -> RunPaths:
        """Makes the folders that others append to.

        Raises:
            ConfigError: the workspace cannot be written.
        """
        paths = cls(Path(workspace).absolute(), run_id)
        try:
            for folder in (paths.logs, paths.cache, paths.weights):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"workspace {paths.workspace} cannot be written ({error.strerror}: "
                f"{error.filename}): choose another with --workspace"
            ) from error
        return paths

    @property
    def local(self) -> Path:
        """Logs, metrics, outbox and caches of the run."""
        return self.workspace / "local" / self.run_id

    @property
    def logs(self) -> Path:
        return self.local / "logs"

    @property
    def cache(self) -> Path:
        """Parts kept near the trainer; safe to delete."""
        return self.local / "cache"

    @property
    def weights(self) -> Path:
        """Exported weights on their way to the engines; safe to delete between runs."""
        return self.local / "weights"


def store_url(workspace: str | Path, configured: str | None) -> str:
    """Where all runs of a workspace are stored."""
    return configured or str(Path(workspace).absolute() / "store")
