"""A real S3 server over HTTP (moto's), and a proxy before it that makes trouble on demand."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from botocore.session import get_session

ROOT = Path(__file__).parents[1]
BUCKET = "runs"
KEYS = {"aws_access_key_id": "tester", "aws_secret_access_key": "secret"}
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "tester",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextmanager
def moto_server() -> Iterator[str]:
    """Serves S3 at the URL it yields, with an empty bucket, from a process of its own: a thread of
    this one stopped listening in mid test, once in some runs."""
    command = [sys.executable, "-m", "benchmarks.kill_matrix.s3_server"]
    server = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        address = server.stdout.readline().strip()
        assert address, f"moto's server ended with {server.wait(10)}"
        url = f"http://{address}"
        make_bucket(url)
        yield url
    finally:
        assert server.poll() is None, "moto's server ended during the test"
        server.stdin.close()
        server.wait(60)


def make_bucket(url: str) -> None:
    client = get_session().create_client("s3", "us-east-1", endpoint_url=url, **KEYS)
    client.create_bucket(Bucket=BUCKET)


@dataclass
class Trouble:
    """What the proxy does to coming requests.

    Attributes:
        answers: (HTTP status, S3 error code) for the next requests, one each; `("drop", "")`
            forwards a request and closes without an answer, `("hang", "")` never answers.
        methods: only these are disturbed.
        away: the answer to every request, as long as it is set.
        expired: a key whose requests are refused as expired.
        deaf: take no notice of If-None-Match, as some servers do.
        seen: methods of all requests.
    """

    answers: list[tuple[int | str, str]] = field(default_factory=list)
    methods: tuple[str, ...] = ("PUT", "GET", "HEAD", "DELETE", "POST")
    away: tuple[int, str] | None = None
    expired: str | None = None
    deaf: bool = False
    seen: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self, method: str) -> tuple[int | str, str] | None:
        with self.lock:
            self.seen.append(method)
            if self.away is not None:
                return self.away
            return self.answers.pop(0) if self.answers and method in self.methods else None


@contextmanager
def troubled(target: str) -> Iterator[tuple[str, Trouble]]:
    """A proxy before an S3 server: yields its URL and what makes its trouble."""
    trouble = Trouble()
    ended = threading.Event()
    to = urlsplit(target)

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            what = trouble.next(self.command)
            if trouble.expired and trouble.expired in (self.headers.get("Authorization") or ""):
                what = (400, "ExpiredToken")
            if what is not None and what[0] == "hang":
                ended.wait(60)
                self.close_connection = True
            elif what is not None and what[0] != "drop":
                self.complain(int(what[0]), what[1])
            else:
                self.forward(body, answer=what is None)

        def forward(self, body: bytes, *, answer: bool) -> None:
            headers = dict(self.headers)
            if trouble.deaf:
                headers = {k: v for k, v in headers.items() if k.lower() != "if-none-match"}
            connection = http.client.HTTPConnection(to.hostname or "", to.port, timeout=30)
            connection.request(self.command, self.path, body, headers)
            got = connection.getresponse()
            data = got.read()
            connection.close()
            if not answer:
                self.close_connection = True
                return
            self.send_response(got.status)
            for name, value in got.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = got.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            self.wfile.write(data)

        def complain(self, status: int, code: str) -> None:
            data = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", trouble
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


def unique_prefix(name: str) -> str:
    """A store URL of its own for a test."""
    return f"s3://{BUCKET}/{name}-{time.monotonic_ns()}"
