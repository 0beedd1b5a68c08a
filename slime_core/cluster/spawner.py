"""Where the processes of a run come from, whichever Ray they live in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class EngineServer(Protocol):
    """A generation server, here or on another node."""

    url: str
    log_path: Path

    @property
    def pid(self) -> int | None: ...

    @property
    def alive(self) -> bool: ...

    @property
    def returncode(self) -> int | None: ...

    def start(self) -> None: ...

    def wait_healthy(self, deadline_s: float) -> None: ...

    def terminate(self) -> int | None: ...

    def log_tail(self, lines: int = ...) -> str: ...


@dataclass(frozen=True)
class EngineOrder:
    """What a generation server is started with.

    Attributes:
        kind: embedded or sglang.
        options: under SGLang's names.
        threads: compute threads on a CPU.
    """

    kind: str
    model_path: str
    log_path: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1


class Spawner(Protocol):
    """The Ray of a run.

    Attributes:
        makes_engines: engines are started through it, not beside it.
    """

    makes_engines: bool

    def start(self) -> None:
        """Starts it or joins it; call it in the main thread."""
        ...

    def spawn(
        self, name: str, actor_class: type, options: Mapping[str, Any], *arguments: Any
    ) -> Any:
        """Creates an actor without waiting for it; returns its handle."""
        ...

    def engine(self, order: EngineOrder) -> EngineServer:
        """A server that is not started yet, on a port that nobody takes meanwhile."""
        ...

    def port(self) -> int:
        """A port that is free where the ranks are."""
        ...

    def stop(self) -> None:
        """Ends what belongs to the run."""
        ...
