"""What the rollout worker adds to its engines' time: `python -m benchmarks.rollout_load`.

A mock engine in another process answers each request after two seconds with 512 tokens and their
log-probs; prompts have 5,000 tokens, so that requests and answers are bodies of about 20 kB. The
real worker keeps 256 requests in flight, grades, stores and seals. Printed are its time against
the ideal one (waves x 2 s) and the cores that its process used; and the time of a client that only
sends and receives the same bytes, which is what machine and mock engine take by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONCURRENT = 256
ANSWER_S = 2.0
ANSWER_TOKENS = 512
PROMPT_TOKENS = 5000


async def serve(answer_s: float) -> None:
    """The mock engine; prints its port."""
    token_log_probs = [[-0.123456 - i * 1e-4, 5 + i % 20, None] for i in range(ANSWER_TOKENS)]
    meta = {
        "id": "r", "finish_reason": {"type": "length", "length": ANSWER_TOKENS},
        "weight_version": "l0-0", "prompt_tokens": PROMPT_TOKENS, "cached_tokens": 0,
        "completion_tokens": ANSWER_TOKENS, "output_token_logprobs": token_log_probs,
    }  # fmt: skip
    one = {"text": "5" * ANSWER_TOKENS, "output_ids": [p[1] for p in token_log_probs]}
    body = json.dumps([one | {"meta_info": meta}]).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    answer = f"{head}\r\n".encode() + body

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                header = await reader.readuntil(b"\r\n\r\n")
                length = int(header.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                await asyncio.sleep(answer_s)
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, limit=1 << 20, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    print(f"answers of {len(body)} bytes", file=sys.stderr)
    await server.serve_forever()


def prompts(folder: Path, count: int) -> str:
    path = folder / "prompts.jsonl"
    rows = (
        json.dumps({"input": f"{i:05d}" * (PROMPT_TOKENS // 5), "label": "1"}) for i in range(count)
    )
    path.write_text("".join(f"{row}\n" for row in rows))
    return str(path)


async def measure(url: str, folder: Path, waves: int) -> dict[str, float]:
    """Seconds of one segment, and CPU seconds of this process meanwhile."""
    from slime_core.config.loading import load_config
    from slime_core.rollout.heap import settle_heap
    from slime_core.rollout.settings import RolloutSettings
    from slime_core.rollout.worker import RolloutWorker

    groups = CONCURRENT * waves
    overrides: dict[str, Any] = {
        "prompt_data": prompts(folder, groups), "num_rollout": 1, "rollout_batch_size": groups,
        "n_samples_per_prompt": 1, "rollout_max_response_len": ANSWER_TOKENS,
        "sglang_server_concurrency": CONCURRENT, "eval_interval": None, "eval_config": None,
    }  # fmt: skip
    config = load_config("configs/quickstart.yaml", overrides)
    store = str(folder / "store")
    worker = RolloutWorker(RolloutSettings(config, "load", store, folder, folder / "log"))
    await worker.setup()
    await worker.fence(0)
    await worker.set_engines([url])
    await worker.open_gate()
    await worker.sample(0, 0)
    settle_heap()
    cpu, begun = _cpu_s(), time.monotonic()
    ref = await worker.generate(0, 0)
    seconds, used = time.monotonic() - begun, _cpu_s() - cpu
    assert ref.rows == groups and ref.tokens == groups * ANSWER_TOKENS
    return {"seconds": seconds, "cpu_s": used}


async def bare(port: int, waves: int) -> float:
    """Seconds of the same exchange without doing anything with it."""
    body = json.dumps({"input_ids": [[7 + i % 10 for i in range(PROMPT_TOKENS)]]}).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    request = head.encode() + body

    async def talk() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(waves):
            writer.write(request)
            header = await reader.readuntil(b"\r\n\r\n")
            length = int(header.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()

    begun = time.monotonic()
    await asyncio.gather(*(talk() for _ in range(CONCURRENT)))
    return time.monotonic() - begun


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--waves", type=int, default=4, help="requests one after another")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help="be the mock engine")
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(ANSWER_S))
        return
    command = [sys.executable, "-m", "benchmarks.rollout_load", "--serve"]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        port = int(engine.stdout.readline())
        ideal = options.waves * ANSWER_S
        for _ in range(options.repeat):
            alone_s = asyncio.run(bare(port, options.waves))
            with tempfile.TemporaryDirectory() as folder:
                url = f"http://127.0.0.1:{port}"
                found = asyncio.run(measure(url, Path(folder), options.waves))
            print(
                f"{CONCURRENT} at once, {options.waves} waves: {found['seconds']:.2f} s, ideal "
                f"{ideal:.0f} s (+{100 * (found['seconds'] / ideal - 1):.1f} %), "
                f"{found['cpu_s'] / found['seconds']:.2f} cores, "
                f"{1e3 * found['cpu_s'] / (CONCURRENT * options.waves):.1f} ms of CPU a request; "
                f"bytes alone {alone_s:.2f} s"
            )
    finally:
        engine.kill()
        engine.wait()


if __name__ == "__main__":
    main()
