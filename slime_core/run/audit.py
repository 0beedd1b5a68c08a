"""Checks a run from its files alone, with pyarrow and JSON.

Nothing of slime-flow is imported, so a fault of the store's own code cannot hide itself here. The
layout this relies on is that of docs/store.md.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

_FINAL = ("kept", "dropped", "spare")
_KEYS = ("group_index", "attempt", "verdict", "data_epoch", "position")


@dataclass
class Audit:
    """What an audit found. A run is sound if `problems` is empty.

    Attributes:
        draws: draws that were logged.
        trained, dropped, unused: groups that ended so.
        open: draws that are not finished (the run was cut off, or aborted them at its end).
        lost: finished groups that a seal or batch needs and no file holds.
        doubled: draws logged twice and groups trained twice.
        skipped: positions of the data that no draw names although later ones are drawn.
        problems: every fault, as a sentence.
    """

    draws: int = 0
    trained: int = 0
    dropped: int = 0
    unused: int = 0
    open: int = 0
    iterations: int = 0
    final_state: str = ""
    lost: list[int] = field(default_factory=list)
    doubled: list[int] = field(default_factory=list)
    skipped: list[tuple[int, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.problems


def audit(run: Path, dataset_rows: int | None = None) -> Audit:
    """Audits the run in a folder of a local store.

    Args:
        run: the folder that holds `draws`, `groups` and `iterations`.
        dataset_rows: rows of the dataset; checks that data epochs are complete, too.
    """
    found = Audit()
    drawn = _draws(run, found, dataset_rows)
    sealed = _seals(run, found, drawn)
    _iterations(run, found, drawn, sealed)
    return found


def _draws(run: Path, found: Audit, dataset_rows: int | None) -> dict[int, tuple[int, int]]:
    """group id -> draw id of everything logged."""
    drawn: dict[int, tuple[int, int]] = {}
    files = sorted((run / "draws").glob("*.arrow"))
    for expected, path in enumerate(files):
        if int(path.stem) != expected:
            found.problems.append(f"draws {expected:06d} is missing before {path.name}")
        table = _read(path)
        columns = [table[name].to_pylist() for name in ("group_index", "data_epoch", "position")]
        rows = list(zip(*columns, strict=True))
        for group, epoch, position in dict.fromkeys(rows):
            if group in drawn:
                found.doubled.append(group)
                found.problems.append(f"draw {group} is logged twice")
            drawn[group] = (epoch, position)
    found.draws = len(drawn)
    for draw, times in Counter(drawn.values()).items():
        if times > 1:
            found.problems.append(f"prompt {draw} was drawn {times} times")
    last = max(drawn.values(), default=(0, -1))
    for epoch in range(last[0] + 1):
        positions = {position for e, position in drawn.values() if e == epoch}
        end = max(positions, default=-1) + 1
        if epoch < last[0] and dataset_rows is not None:
            end = dataset_rows
        for position in sorted(set(range(end)) - positions):
            found.skipped.append((epoch, position))
            found.problems.append(f"prompt {(epoch, position)} was skipped")
    if sorted(drawn) != list(range(len(drawn))):
        found.problems.append("group ids of the draws have a gap")
    return drawn


def _seals(
    run: Path, found: Audit, drawn: dict[int, tuple[int, int]]
) -> dict[int, tuple[str, dict[int, tuple[Any, ...]]]]:
    """segment -> (digest of its seal, group id -> (attempt, verdict, digest of its rows))."""
    sealed: dict[int, tuple[str, dict[int, tuple[Any, ...]]]] = {}
    finished_in: dict[int, int] = {}
    parent = ""
    for path in sorted((run / "groups").glob("*/seal.json")):
        document = _document(path, found)
        body, segment = document["body"], int(path.parent.name)
        if body["segment"] != segment or body["parent"] != parent:
            found.problems.append(f"{path} does not follow the seal before it")
        parent = document["digest"]
        held = _rows_of_parts(run, document, path.parent, found)
        groups: dict[int, tuple[Any, ...]] = {}
        for group, attempt, verdict, _, rows, _, _, digest in body["groups"]:
            if held is not None and held.get((group, attempt, verdict)) != rows:
                found.lost.append(group)
                found.problems.append(f"{path} names rows of group {group} that no part holds")
            if group not in drawn:
                found.problems.append(f"{path} names group {group}, which was never drawn")
            if verdict in _FINAL:
                if group in groups or group in finished_in:
                    found.problems.append(f"group {group} was finished twice")
                groups[group] = (attempt, verdict, digest)
                finished_in[group] = segment
        sealed[segment] = (document["digest"], groups)
    return sealed


def _rows_of_parts(
    run: Path, seal: dict[str, Any], folder: Path, found: Audit
) -> dict[tuple[int, int, str], int] | None:
    """(group id, attempt, verdict) -> rows, from the parts that a seal lists or the file they were
    put together in; None where the rows were given up."""
    if (folder / "dropped.json").is_file():
        return None
    paths = [run / part[0] for part in seal["by"]["parts"]]
    compacted = sorted(folder.glob("compact-*.arrow"))[:1]
    if compacted and not all(path.is_file() for path in paths):
        paths = compacted
    held: dict[tuple[int, int, str], int] = {}
    for path in paths:
        if not path.is_file():
            found.problems.append(f"{path} is gone, but a seal needs it")
            continue
        table = _read(path)
        keys = list(zip(*(table[name].to_pylist() for name in _KEYS[:3]), strict=True))
        for key, rows in Counter(keys).items():
            held.setdefault(key, rows)
    return held


def _iterations(
    run: Path,
    found: Audit,
    drawn: dict[int, tuple[int, int]],
    sealed: dict[int, tuple[str, dict[int, tuple[Any, ...]]]],
) -> None:
    """Follows batch -> seal and ledger -> batch and the chain of states."""
    trained: dict[int, int] = {}
    unused: dict[int, str] = {}
    for path in sorted((run / "iterations").glob("*/batch.json")):
        body, iteration = _document(path, found)["body"], int(path.parent.name)
        for segment, digest in body["seals"].items():
            if sealed.get(int(segment), ("",))[0] != digest:
                found.problems.append(f"{path} names a seal of segment {segment} that is not there")
        ledger = (path.parent / "ledger.json").is_file()
        for group, attempt, segment, _, digest in body["groups"]:
            stored = sealed.get(segment, ("", {}))[1].get(group)
            if stored not in [(attempt, kind, digest) for kind in ("kept", "spare")]:
                found.lost.append(group)
                found.problems.append(f"{path} trains rows of group {group} that were not sealed")
            if group in trained:
                found.doubled.append(group)
                found.problems.append(
                    f"group {group} is in batches {trained[group]} and {iteration}"
                )
            trained[group] = iteration
        for group, *_, reason in body["unused"]:
            unused[group] = reason
        if not ledger and (run / "iterations" / f"{iteration + 1:06d}" / "ledger.json").is_file():
            found.problems.append(f"iteration {iteration} has no ledger, but the next one has")
    _chain(run, found)
    applied = {group for group, iteration in trained.items() if iteration < found.iterations}
    verdicts = {g: entry[1] for _, groups in sealed.values() for g, entry in groups.items()}
    dropped = {group for group, verdict in verdicts.items() if verdict == "dropped"}
    found.trained, found.dropped = len(applied), len(dropped)
    found.unused = len(set(unused) - dropped)
    found.open = len(set(drawn) - applied - dropped - set(unused))
    for group in sorted(set(unused) & set(trained)):
        found.problems.append(f"group {group} is called unused, but batch {trained[group]} has it")


def _chain(run: Path, found: Audit) -> None:
    """Recomputes every state of the ledger from the one before it."""
    previous: str | None = None
    for expected, path in enumerate(sorted((run / "iterations").glob("*/ledger.json"))):
        body = _document(path, found)["body"]
        if int(path.parent.name) != expected:
            found.problems.append(f"the ledger of iteration {expected} is missing")
        batch = _document(path.with_name("batch.json"), found)
        if batch["digest"] != body["batch"]:
            found.problems.append(f"{path} was trained on another batch")
        if previous is not None and body["parent"] != previous:
            found.problems.append(f"{path} does not follow the entry before it")
        chained = _sha256(["iteration", body["parent"], body["batch"], body["numeric"]])
        if body["state"] != chained:
            found.problems.append(f"{path} has a state that does not follow from what it names")
        previous = body["state"]
        found.iterations = expected + 1
        found.final_state = body["state"]


def _document(path: Path, found: Audit) -> dict[str, Any]:
    """A stored document; its digest is checked."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if _sha256(document["body"]) != document["digest"]:
        found.problems.append(f"{path} does not have the digest it names")
    return document


def _sha256(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()
