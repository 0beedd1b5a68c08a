"""Moto's S3 server: prints its address, serves until its stdin is closed."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def serving() -> Iterator[str]:
    """Serves in threads of this process; yields HOST:PORT."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells of every request
    moto = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def one_at_a_time(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        """Moto looks for an object and then creates it: two writers at once would both win."""
        with lock:
            return list(moto(environ, start_response))

    server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    with serving() as address:
        print(address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
