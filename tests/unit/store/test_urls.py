"""Prompts at URLs: fetched once, streamed for a look, and one sentence where nobody answers."""

import functools
import gzip
import http.server
import json
from threading import Thread

import pyarrow as pa
import pytest

from slime_core.data.readers import read_rows
from slime_core.data.sources import PromptSource, SourceSettings
from slime_core.errors import DataError
from slime_core.store.urls import Fetched, open_stream

LINES = "".join(json.dumps({"input": f"prompt {i}"}) + "\n" for i in range(6)).encode()


class Handler(http.server.SimpleHTTPRequestHandler):
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self):
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, format, *args):
        pass


@pytest.fixture
def web(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(LINES)
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(LINES))
    with pa.CompressedOutputStream(str(tmp_path / "p.jsonl.zst"), "zstd") as file:
        file.write(LINES)
    Handler.asked.clear()
    handler = functools.partial(Handler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.jsonl.zst", "p.jsonl?token=1"])
def test_a_file_on_the_web_is_read_like_a_local_one(web, name, tmp_path):
    source = PromptSource(f"{web}/{name}@[1:4]", SourceSettings(), opener=Fetched())
    assert [draw.samples[0].prompt for draw in source.draw(4)] == [
        "prompt 1", "prompt 2", "prompt 3", "prompt 1"]  # fmt: skip
    assert len([path for path in Handler.asked if path.startswith("/p.")]) == 1, "fetched once"
    local = name.partition("?")[0]
    same = PromptSource(f"{tmp_path / local}@[1:4]", SourceSettings())
    assert source.fingerprint == same.fingerprint


def test_a_look_streams_the_file(web):
    rows = read_rows(f"{web}/p.jsonl", opener=open_stream)
    assert next(rows).values == {"input": "prompt 0"}


def test_what_cannot_be_read_is_one_sentence(web):
    with pytest.raises(DataError, match=r"/none\.jsonl cannot be read: FileNotFoundError"):
        PromptSource(f"{web}/none.jsonl", SourceSettings(), opener=Fetched())
    with pytest.raises(DataError, match="gs:// cannot be read; use http, https, s3 or a path"):
        PromptSource("gs://bucket/p.jsonl", SourceSettings(), opener=Fetched())
    with pytest.raises(DataError, match="only local files can be read here"):
        PromptSource(f"{web}/p.jsonl", SourceSettings())
