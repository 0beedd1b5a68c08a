"""A held port is nobody else's until its server takes it."""

import errno
import socket

import pytest

from slime_core.cluster.ports import HeldPort


def test_a_server_can_listen_on_a_held_port_and_serve():
    port = HeldPort()
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port.number))
        server.listen()
        with socket.create_connection(("127.0.0.1", port.number), timeout=5):
            connection, _ = server.accept()
            connection.close()
        port.release()
        with socket.create_connection(("127.0.0.1", port.number), timeout=5):
            pass


def test_a_careless_bind_does_not_get_a_held_port():
    port = HeldPort()
    with socket.socket() as other:
        with pytest.raises(OSError) as error:
            other.bind(("127.0.0.1", port.number))
        assert error.value.errno == errno.EADDRINUSE
    port.release()


def test_held_ports_are_different():
    ports = [HeldPort() for _ in range(50)]
    assert len({port.number for port in ports}) == 50
    for port in ports:
        port.release()
