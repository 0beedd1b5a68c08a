"""What the store adds to an iteration of 128 samples, and how fast samples become Arrow rows.

    python benchmarks/store.py [--folder DIR] [--iterations 40]

Wall and CPU milliseconds of one process, median and 90th percentile, with and without fsync, all
groups in one part and each in its own (as a local store has it).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from slime_core.run.epoch import Lease
from slime_core.sample import Sample
from slime_core.store.backend import open_backend
from slime_core.store.batch import BatchContent, BatchGroup, put_batch
from slime_core.store.cache import NodeCache
from slime_core.store.codec import samples_to_rows
from slime_core.store.draws import Draw, log_draws
from slime_core.store.ledger import initial_state, put_ledger, put_sync
from slime_core.store.load import load_train_batch
from slime_core.store.parts import GroupRows, write_part
from slime_core.store.seal import adopt, put_seal

GROUPS, SAMPLES, RESPONSE_TOKENS = 16, 8, 12


@dataclass
class Times:
    """Wall and CPU seconds of each step, by name."""

    wall_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall_s.setdefault(name, []).append(time.perf_counter() - wall)
        self.cpu_s.setdefault(name, []).append(time.process_time() - cpu)

    def total(self) -> None:
        for table in (self.wall_s, self.cpu_s):
            table["total"] = [sum(row) for row in zip(*table.values(), strict=True)]

    def show(self, title: str) -> None:
        print(f"\n{title}\n{'':12}{'wall p50':>10}{'p90':>8}{'CPU p50':>10}{'p90':>8}  ms")
        for name in self.wall_s:
            numbers = [
                1e3 * np.percentile(table[name], q)
                for table in (self.wall_s, self.cpu_s)
                for q in (50, 90)
            ]
            print("{:12}{:10.2f}{:8.2f}{:10.2f}{:8.2f}".format(name, *numbers))


def sample(group: int, i: int, response_tokens: int = RESPONSE_TOKENS) -> Sample:
    """A finished sample as the quickstart makes them."""
    made = Sample(
        group_index=group, index=group * SAMPLES + i, prompt="sort 4821 =", tokens=[1, 2, 3, 4, 5],
        label="1248", metadata={"row": group, "rm_type": "exact"}, reward=1.0,
    )  # fmt: skip
    rng = np.random.default_rng([group, i])
    made.append_response_tokens(
        tokens=rng.integers(0, 150_000, response_tokens).tolist(),
        log_probs=(-rng.random(response_tokens, dtype=np.float32)).tolist(),
        text="1248",
        meta_info={"finish_reason": {"type": "stop"}, "weight_version": "a-0"},
    )
    return made


def commit_iterations(folder: Path, iterations: int, fsync: bool, one_part: bool) -> Times:
    """Everything the store does for an iteration, as the stages do it."""
    times = Times()
    backend = open_backend(str(folder), fsync=fsync)
    cache = NodeCache(backend)
    state, parent = initial_state("weights"), ""
    with Lease.acquire(backend) as lease:
        for k in range(iterations):
            ids = range(k * GROUPS, (k + 1) * GROUPS)
            made = [[sample(group, i) for i in range(SAMPLES)] for group in ids]
            prompts = [
                [Sample(group_index=s.group_index, index=s.index, prompt=s.prompt) for s in group]
                for group in made
            ]
            draws = [
                Draw(g, 0, g, k, p, {"next": g + 1}) for g, p in zip(ids, prompts, strict=True)
            ]
            rows = [GroupRows(g, 0, 0, g, s) for g, s in zip(ids, made, strict=True)]
            with times.step("draws"):
                log_draws(backend, k, draws)
            with times.step("parts"):
                for seq, groups in enumerate([rows] if one_part else [[row] for row in rows]):
                    write_part(backend, k, lease.epoch, seq, groups)
            with times.step("seal"):
                seal = put_seal(
                    backend, lease, adopt(cache, k), parent=parent,
                    draws=(ids[0], ids[-1] + 1), tokenizer_digest="t",
                )  # fmt: skip
                parent = seal.digest
            entries = [group.entry for group in seal.groups]
            count = seal.rows
            content = BatchContent(
                k, tuple(BatchGroup(e.group_id, e.attempt, k, e.rows, e.digest) for e in entries),
                {k: seal.digest}, [0.5] * count, [1.0] * count, range(count), [12.0] * count,
                (tuple(range(count)),),
            )  # fmt: skip
            with times.step("batch"):
                batch = put_batch(backend, lease, content)
            with times.step("load"):
                load_train_batch(backend, batch, cache)
            with times.step("ledger"):
                state = put_ledger(
                    backend, lease, iteration=k, parent=state, batch_digest=batch.digest,
                    numeric_digest="n", weight_version=f"a-{k + 1}", result={"steps": []},
                ).state  # fmt: skip
            with times.step("sync"):
                put_sync(backend, k, f"a-{k + 1}", {"canary": 1e-7})
    times.total()
    return times


def tokens_per_second(encode: Callable[[list[Sample]], object]) -> float:
    """Of long samples, best of five."""
    samples = [sample(0, i, 3_000) for i in range(128)]
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        encode(samples)
        best = min(best, time.perf_counter() - began)
    return sum(len(s.tokens) for s in samples) / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where to write; the file system matters")
    parser.add_argument("--iterations", type=int, default=40)
    options = parser.parse_args()
    for one_part in (True, False):
        for fsync in (False, True):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                times = commit_iterations(Path(folder), options.iterations, fsync, one_part)
            parts = "one part" if one_part else f"{GROUPS} parts"
            times.show(f"{GROUPS} x {SAMPLES} samples, {parts}, fsync {'on' if fsync else 'off'}")
    print(f"\nSample objects to Arrow: {tokens_per_second(samples_to_rows) / 1e6:.0f} Mtok/s")


if __name__ == "__main__":
    main()
