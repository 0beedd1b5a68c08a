"""Engine processes on this machine, with the ports that are kept for them."""

from __future__ import annotations

from slime_core.cluster.ports import HeldPort
from slime_core.cluster.spawner import EngineOrder
from slime_core.engines.launcher import EngineProcess, engine_process, free_port

LOOPBACK = "127.0.0.1"


class EngineMaker:
    """Makes engine processes and holds the ports of those that do not look themselves."""

    def __init__(self, host: str = LOOPBACK) -> None:
        self._host = host
        self._ports: list[HeldPort] = []

    def make(self, order: EngineOrder) -> EngineProcess:
        """An engine that is not started yet."""
        return engine_process(
            order.kind,
            order.model_path,
            self._port(order.kind),
            order.log_path,
            order.options,
            host=self._host,
            threads=order.threads,
        )

    def release(self) -> None:
        """Lets others have the ports."""
        for port in self._ports:
            port.release()
        self._ports.clear()

    def _port(self, kind: str) -> int:
        """A port for a new engine, held for the embedded one. SGLang looks for itself whether its
        port is free, before it listens."""
        if kind != "embedded":
            return free_port(self._host)
        self._ports.append(HeldPort(self._host))
        return self._ports[-1].number
