"""How fast and how small samples are stored, beside torch.save of dicts and JSON lines.

    python -m benchmarks.store_formats [--samples 2048] [--tokens 3125] [--iterations 1000]

Data: token ids by a Zipf law, log-probs of which 45 % are exactly zero, in groups of 8. Medians of
five, one thread. Then SQL over many iterations and the speed of `slime verify`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import store as small
from slime_core.sample import Sample
from slime_core.store.backend import open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.compaction import compact_segment
from slime_core.store.digest import checksum
from slime_core.store.layout import RUN
from slime_core.store.parts import GroupRows, PartFile, open_part, serialise, write_part
from slime_core.store.query import query
from slime_core.store.schema import PART_SCHEMA
from slime_core.store.seal import adopt, put_seal, read_seal
from slime_core.store.verify import verify_run

GROUP, PROMPT_TOKENS, VOCABULARY = 8, 100, 150_000
ZERO_LOG_PROBS = 0.45


@dataclass(frozen=True)
class Timed:
    """The median time of five calls, and what the last one returned."""

    seconds: float
    value: Any


def median(call: Callable[[], Any]) -> Timed:
    seconds, value = [], None
    for _ in range(5):
        start = time.perf_counter()
        value = call()
        seconds.append(time.perf_counter() - start)
    return Timed(statistics.median(seconds), value)


def make_samples(count: int, tokens: int) -> list[Sample]:
    """Finished samples; lengths vary by a half around `tokens`."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(count):
        length = int(rng.integers(tokens // 2, tokens + tokens // 2))
        ids = np.minimum(rng.zipf(1.3, PROMPT_TOKENS + length), VOCABULARY - 1)
        log_probs = -rng.exponential(0.5, length).astype(np.float32)
        log_probs[rng.random(length) < ZERO_LOG_PROBS] = 0
        sample = Sample(
            group_index=i // GROUP, index=i, prompt="p" * 400, label="42", reward=float(i % 2),
            tokens=ids[:PROMPT_TOKENS].tolist(), metadata={"row": i // GROUP},
        )  # fmt: skip
        sample.append_response_tokens(
            tokens=ids[PROMPT_TOKENS:].tolist(), log_probs=log_probs.tolist(), text="r" * length,
            meta_info={"finish_reason": {"type": "stop"}, "weight_version": "l0-0"},
        )  # fmt: skip
        made.append(sample)
    return made


def formats(samples: list[Sample], folder: Path) -> None:
    """The table of docs/durability.md."""
    tokens = sum(len(sample.tokens) for sample in samples)
    dicts = [sample.to_dict() for sample in samples]
    groups = [
        GroupRows(g, 0, 0, g, samples[g * GROUP : (g + 1) * GROUP], grader_digest="g")
        for g in range(len(samples) // GROUP)
    ]
    saved = median(lambda: torch.save(dicts, folder / "samples.pt"))
    lines = median(lambda: _write_lines(dicts, folder / "samples.jsonl"))
    made = iter(range(1000))
    objects = median(lambda: _written(folder / f"o{next(made)}", lambda b: [_part(b, groups)]))
    backend = objects.value
    cache = NodeCache(backend)
    key = next(e.key for e in backend.list("groups/") if e.key.endswith(".arrow"))
    batches = open_part(cache, key).all_rows().rows.to_batches()
    columns = median(lambda: _from_columns(batches, folder / f"c{next(made)}"))
    tensors = median(lambda: _tensors(cache, key))
    already = open_part(cache, key)
    unverified = median(lambda: _tensors(cache, key, already))
    plain_bytes = backend.list(key)[0].size_bytes
    packed = compact_segment(cache, 0)
    assert packed is not None
    compact = next(e.key for e in backend.list("groups/") if "compact-" in e.key)
    rewards = median(lambda: _rewards(cache, compact))
    rate = {
        "torch.save of dicts": (saved, (folder / "samples.pt").stat().st_size),
        "JSON lines": (lines, (folder / "samples.jsonl").stat().st_size),
        "part and seal, from Sample": (objects, plain_bytes),
        "part, from columns": (columns, plain_bytes),
    }
    print(f"{len(samples)} samples, {tokens / 1e6:.1f}M tokens")
    for name, (timed, size) in rate.items():
        speed = tokens / timed.seconds
        print(
            f"  {name:<28} {speed / 1e6:8.1f} Mtok/s {saved.seconds / timed.seconds:6.1f}x "
            f"{size / tokens:6.2f} B/token"
        )
    print(f"  compacted {packed.bytes_after / tokens:.2f} B/token")
    print(f"  all rewards of a compacted segment: {1e3 * rewards.seconds:.1f} ms")
    print(f"  all tokens as torch tensors: {1e3 * tensors.seconds:.1f} ms with the checksum of the "
          f"file, {1e3 * unverified.seconds:.1f} ms from an open one")  # fmt: skip


def verify_speed(samples: list[Sample], folder: Path) -> None:
    """`slime verify` beside the checksum alone, on the same mapped files."""
    backend = open_backend(str(folder))
    for segment in range(4):
        groups = [
            GroupRows(g, 0, 0, g, samples[g * GROUP : (g + 1) * GROUP], grader_digest="g")
            for g in range(len(samples) // GROUP)
        ]
        write_part(backend, segment, 0, 0, groups)
        found = adopt(NodeCache(backend), segment)
        put_seal(backend, small_owner(), found, parent="", draws=(0, 1), tokenizer_digest="t")
    cache = NodeCache(backend)
    parts = [e for e in backend.list("groups/") if e.key.endswith(".arrow")]
    alone = median(lambda: [checksum(cache.read(entry.key)) for entry in parts])
    checked = median(lambda: verify_run(cache))
    assert checked.value == [], checked.value
    size = sum(entry.size_bytes for entry in parts)
    print(
        f"verify {size / checked.seconds / 1e9:.2f} GB/s, the checksum alone "
        f"{size / alone.seconds / 1e9:.2f} GB/s: {100 * alone.seconds / checked.seconds:.0f} %"
    )


def sql_speed(iterations: int, folder: Path) -> None:
    """Count and mean reward by iteration, of 256 samples each."""
    small.GROUPS = 32
    small.commit_iterations(folder / "run", iterations, fsync=False, one_part=True)
    backend = open_backend(str(folder / "run"))
    backend.put_new(RUN, b"{}")
    cache = NodeCache(backend, folder / "cache")
    for name in ("first", "second", "third"):
        start = time.perf_counter()
        sql = "SELECT iteration, count(*), avg(reward) FROM samples GROUP BY 1"
        rows = query(cache, sql).num_rows
        print(f"SQL, {rows} iterations x 256 samples, {name}: {time.perf_counter() - start:.2f} s")


def small_owner() -> Any:
    """Owns a store that nobody else uses."""

    class Owner:
        epoch = 0

        def guard(self) -> None:
            return

    return Owner()


def _write_lines(dicts: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in dicts:
            file.write(json.dumps(row, default=str) + "\n")


def _written(folder: Path, write: Callable[[Any], Any]) -> Any:
    backend = open_backend(str(folder))
    write(backend)
    found = adopt(NodeCache(backend), 0)
    put_seal(backend, small_owner(), found, parent="", draws=(0, 1), tokenizer_digest="t")
    assert read_seal(backend, 0) is not None
    return backend


def _part(backend: Any, groups: list[GroupRows]) -> Any:
    return write_part(backend, 0, 0, 0, groups)


def _from_columns(batches: list[Any], folder: Path) -> None:
    data = serialise(batches, PART_SCHEMA, {"version": 1})
    open_backend(str(folder)).put_new(f"groups/{checksum(data)}", memoryview(data))


def _tensors(cache: NodeCache, key: str, open_file: PartFile | None = None) -> list[torch.Tensor]:
    """The tokens of all samples, without a copy. The file is opened and verified if none is."""
    file = open_part(cache, key) if open_file is None else open_file
    tensors: list[torch.Tensor] = []
    for rows in file.columns(["tokens"]):
        tokens = rows.tokens
        tensors += torch.frombuffer(tokens.values, dtype=torch.int32).split(tokens.lengths.tolist())
    return tensors


def _rewards(cache: NodeCache, key: str) -> Any:
    import pyarrow as pa

    options = pa.ipc.IpcReadOptions(included_fields=[PART_SCHEMA.get_field_index("reward")])
    return pa.ipc.open_file(pa.BufferReader(cache.read(key)), options=options).read_all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=3025)
    parser.add_argument("--iterations", type=int, default=1000)
    options = parser.parse_args()
    samples = make_samples(options.samples, options.tokens)
    for measure in (formats, verify_speed):
        with tempfile.TemporaryDirectory() as folder:
            measure(samples, Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        sql_speed(options.iterations, Path(folder))
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GB")


if __name__ == "__main__":
    main()
