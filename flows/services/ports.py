"""Ports on the loopback address, and who has the one that is wanted."""

from __future__ import annotations

import socket

import psutil

from flows.server import HOST
from flows.services.processes import ServiceError


def listener(port: int, purpose: str, flag: str) -> socket.socket:
    """A bound socket, so that nobody takes the port before the service listens.

    Args:
        port: 0 takes any free one.
        purpose: what it is for, in the error.
        flag: that chooses another port.

    Raises:
        ServiceError: somebody else has it; names the process where that can be seen.
    """
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((HOST, port))
    except OSError as error:
        bound.close()
        raise ServiceError(
            f"port {port} for {purpose} is in use by {holder(port)}: end that, or choose another "
            f"with {flag} PORT"
        ) from error
    return bound


def holder(port: int) -> str:
    """`process 12 (python app.py)`, as far as this user may see."""
    for process in psutil.process_iter(["pid"]):
        try:
            connections = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        for one in connections:
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port:
                try:
                    command = " ".join(process.cmdline())[:120]
                except psutil.Error:
                    command = "command unknown"
                return f"process {process.pid} ({command})"
    return "a process that this user cannot see"
