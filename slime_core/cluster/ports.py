"""Ports that nobody else takes before the process they are meant for has started."""

from __future__ import annotations

import socket


class HeldPort:
    """A free port on this machine, kept for a child that will listen there.

    Between the choice of a port and the moment a server listens lie seconds of imports, and Ray
    opens dozens of connections meanwhile. A socket that is bound but does not listen keeps the
    port out of everybody's automatic choice, while a server that sets SO_REUSEADDR, as all of
    ours do, can still take it.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Lets others have it; a server that listens there already goes on."""
        self._socket.close()
