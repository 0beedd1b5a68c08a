"""Samples, groups and whole iterations for the tests of the store and of runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slime_core.sample import Sample
from slime_core.store.backend import Backend
from slime_core.store.batch import Batch, BatchContent, BatchGroup, put_batch
from slime_core.store.cache import NodeCache
from slime_core.store.draws import Draw, log_draws
from slime_core.store.ledger import Ledger, put_ledger
from slime_core.store.parts import GroupRows, Part, write_part
from slime_core.store.seal import Seal, adopt, put_seal

SAMPLES = 4  # a group


@dataclass
class FakeOwner:
    """An owner that nobody takes over from."""

    epoch: int = 0
    guarded: int = 0

    def guard(self) -> None:
        self.guarded += 1


def prompt_sample(group: int, i: int = 0) -> Sample:
    return Sample(
        group_index=group,
        index=group * SAMPLES + i,
        prompt=f"sort {group}",
        tokens=[7, 8, group],
        label=str(group),
        metadata={"row": group},
    )


def finished_sample(group: int, i: int = 0, length: int | None = None) -> Sample:
    """A sample with a response; equal arguments give equal samples."""
    sample = prompt_sample(group, i)
    count = 1 + (group + i) % 5 if length is None else length
    rng = np.random.default_rng([group, i])
    sample.append_response_tokens(
        tokens=rng.integers(0, 100, count).tolist(),
        log_probs=(-rng.random(count, dtype=np.float32)).tolist(),
        text=f"answer {i}",
        meta_info={"finish_reason": {"type": "stop"}, "weight_version": "a-0"},
    )
    sample.reward = float(i % 2)
    return sample


def draw(group: int, segment: int = 0, rows: int = 1000) -> Draw:
    samples = [prompt_sample(group, i) for i in range(SAMPLES)]
    epoch, position = divmod(group, rows)
    return Draw(group, epoch, position, segment, samples, {"next": group + 1})


def group_rows(group: int, attempt: int = 0, verdict: str = "kept", **more: object) -> GroupRows:
    samples = [finished_sample(group, i) for i in range(SAMPLES)]
    return GroupRows(group, attempt, 0, group, samples, verdict, grader_digest="g", **more)


def write_groups(
    backend: Backend, segment: int, groups: list[GroupRows], epoch: int = 0, seq: int = 0
) -> Part:
    return write_part(backend, segment, epoch, seq, groups)


def seal_segment(backend: Backend, segment: int, parent: str = "", epoch: int = 0) -> Seal:
    found = adopt(NodeCache(backend), segment)
    ids = [group.entry.group_id for group in found.groups]
    return put_seal(
        backend,
        FakeOwner(epoch),
        found,
        parent=parent,
        draws=(min(ids), max(ids) + 1),
        tokenizer_digest="t",
    )


def batch_content(iteration: int, seal: Seal) -> BatchContent:
    """Trains every kept group of a seal in one optimizer step."""
    kept = seal.as_segment().kept
    groups = tuple(
        BatchGroup(e.group_id, e.attempt, seal.segment, e.rows, e.digest)
        for e in (group.entry for group in kept)
    )
    rows = sum(group.rows for group in groups)
    unused = tuple(
        (e.group_id, e.attempt, seal.segment, e.reason or e.verdict)
        for e in (group.entry for group in seal.as_segment().finished.values())
        if e.verdict == "dropped"
    )
    return BatchContent(
        iteration=iteration,
        groups=groups,
        seals={seal.segment: seal.digest},
        rewards=[0.5 * i for i in range(rows)],
        raw_rewards=[1.0] * rows,
        rollout_ids=list(range(rows)),
        denominators=[100.0] * rows,
        steps=(tuple(range(rows)),),
        unused=unused,
    )


def add_ledger(backend: Backend, batch: Batch, parent: str, epoch: int = 0) -> Ledger:
    k = batch.content.iteration
    return put_ledger(
        backend,
        FakeOwner(epoch),
        iteration=k,
        parent=parent,
        batch_digest=batch.digest,
        numeric_digest="n",
        weight_version=f"a-{k + 1}",
        result={"steps": [{"loss": 0.25, "skipped": False}], "metrics": {}},
    )


def run_iteration(
    backend: Backend,
    k: int,
    parent_state: str,
    parent_seal: str,
    made: Callable[[int], GroupRows] = group_rows,
) -> tuple[str, str]:
    """One whole iteration of two groups; returns the new state and the seal's digest."""
    first = 2 * k
    assert log_draws(backend, k, [draw(first, k), draw(first + 1, k)]) is None
    write_groups(backend, k, [made(first)])
    write_groups(backend, k, [made(first + 1)], seq=1)
    seal = seal_segment(backend, k, parent_seal)
    batch = put_batch(backend, FakeOwner(), batch_content(k, seal))
    return add_ledger(backend, batch, parent_state).state, seal.digest
