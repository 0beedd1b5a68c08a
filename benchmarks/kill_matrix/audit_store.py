"""Checks the files of a killed run, with pyarrow and JSON alone: nothing of the product is used.

The layout this relies on is that of docs/store.md.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

FINAL = ("kept", "dropped", "spare")
CONTENT = ("tokens", "loss_mask", "rollout_log_probs", "reward", "status")
COMPARED = ("groups/*/seal.json", "iterations/*/*.json", "evals/*/*.json")


@dataclass(frozen=True)
class Finished:
    """A group that is finished: all its rows stand in a part.

    Attributes:
        part: name of the part.
        content: digest of its tokens, masks, log-probs and rewards.
    """

    attempt: int
    verdict: str
    part: str
    content: str


Acknowledged = dict[int, Finished]


@dataclass
class StoreAudit:
    """What the files say.

    Attributes:
        problems: every fault, as a sentence.
        final_weights: digest of the weights after the last training step.
    """

    problems: list[str] = field(default_factory=list)
    final_weights: str = ""


def acknowledged(run: Path) -> Acknowledged:
    """group id -> every group that is finished at this moment."""
    return {group: found[0] for group, found in _finished(run).items()}


def audit_store(
    run: Path, dataset_rows: int, iterations: int, seen: Sequence[Acknowledged] = ()
) -> StoreAudit:
    """Audits a run that has finished.

    Args:
        run: the folder that holds `draws`, `groups` and `iterations`.
        dataset_rows: rows of the dataset.
        iterations: how many the run was to train.
        seen: what was finished at earlier moments, for example behind each kill.
    """
    audit = StoreAudit()
    drawn = _draws(run, dataset_rows, audit.problems)
    finished = _finished(run)
    for group, places in finished.items():
        if len(places) > 1:
            parts = ", ".join(place.part for place in places)
            audit.problems.append(f"group {group} was generated again although finished: {parts}")
    sealed = _seals(run, drawn, finished, audit.problems)
    _batches(run, iterations, sealed, audit.problems)
    _ledgers(run, iterations, audit)
    _lost(seen, finished, sealed, audit.problems)
    return audit


def differences(run: Path, untouched: Path) -> list[str]:
    """Documents whose bodies are not those of a run that nobody touched."""
    problems = []
    for pattern in COMPARED:
        here, there = (
            {path.relative_to(folder).as_posix(): path for path in folder.glob(pattern)}
            for folder in (run, untouched)
        )
        problems += [f"{key} is not in the untouched run" for key in sorted(here.keys() - there)]
        problems += [f"{key} is only in the untouched run" for key in sorted(there.keys() - here)]
        for key in sorted(here.keys() & there.keys()):
            mine, other = (json.loads(path.read_text())["body"] for path in (here[key], there[key]))
            if mine != other:
                what = ", ".join(_unequal(mine, other))
                problems.append(f"{key} differs from the untouched run's in {what}")
    return problems


def _draws(run: Path, dataset_rows: int, problems: list[str]) -> dict[int, tuple[int, int]]:
    """group id -> (data epoch, position); every prompt must be drawn once, in order."""
    drawn: dict[int, tuple[int, int]] = {}
    for expected, path in enumerate(sorted((run / "draws").glob("*.arrow"))):
        if path.stem != f"{expected:06d}":
            problems.append(f"draws {expected:06d} are missing before {path.name}")
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        columns = (table[name].to_pylist() for name in ("group_index", "data_epoch", "position"))
        for group, epoch, position in dict.fromkeys(zip(*columns, strict=True)):
            if group in drawn:
                problems.append(f"group {group} is drawn twice")
            drawn[group] = (epoch, position)
    for prompt, times in Counter(drawn.values()).items():
        if times > 1:
            problems.append(f"prompt {prompt} is drawn {times} times")
    should = [divmod(number, dataset_rows) for number in range(len(drawn))]
    for prompt in sorted(set(should) - set(drawn.values())):
        problems.append(f"prompt {prompt} is skipped")
    if sorted(drawn) != list(range(len(drawn))):
        problems.append("the group ids of the draws have a gap")
    return drawn


def _finished(run: Path) -> dict[int, list[Finished]]:
    """group id -> every part in which it is finished."""
    found: dict[int, list[Finished]] = {}
    for path in sorted((run / "groups").glob("*/[0-9]*.arrow")):
        for group, entry in _groups_of(path):
            found.setdefault(group, []).append(entry)
    return found


def _groups_of(path: Path) -> Iterator[tuple[int, Finished]]:
    part = pa.ipc.open_file(pa.memory_map(str(path)))
    for number in range(part.num_record_batches):
        rows = part.get_batch(number)
        group, attempt, verdict = (
            rows.column(name)[0].as_py() for name in ("group_index", "attempt", "verdict")
        )
        if verdict in FINAL:
            content = repr([rows.column(name).to_pylist() for name in CONTENT])
            digest = hashlib.sha256(content.encode()).hexdigest()
            name = f"{path.parent.name}/{path.name}"
            yield group, Finished(attempt, verdict, name, digest)


Sealed = dict[int, tuple[int, str, int, str]]  # group id -> attempt, verdict, segment, rows' digest


def _seals(
    run: Path,
    drawn: dict[int, tuple[int, int]],
    finished: dict[int, list[Finished]],
    problems: list[str],
) -> Sealed:
    sealed: Sealed = {}
    parent = ""
    for path in sorted((run / "groups").glob("*/seal.json")):
        document = _document(path, problems)
        body = document["body"]
        if body["parent"] != parent:
            problems.append(f"the seal of segment {body['segment']} does not follow the one before")
        parent = document["digest"]
        for group, attempt, verdict, _, _, _, _, digest in body["groups"]:
            if verdict not in FINAL:
                continue
            if group in sealed:
                problems.append(f"group {group} is sealed twice")
            if group not in drawn:
                problems.append(f"group {group} is sealed and was never drawn")
            places = [(place.attempt, place.verdict) for place in finished.get(group, [])]
            if (attempt, verdict) not in places:
                problems.append(f"group {group} is lost: a seal names it, no part holds it")
            sealed[group] = (attempt, verdict, body["segment"], digest)
    return sealed


def _batches(run: Path, iterations: int, sealed: Sealed, problems: list[str]) -> None:
    trained: dict[int, int] = {}
    unused: set[int] = set()
    for path in sorted((run / "iterations").glob("*/batch.json")):
        body = _document(path, problems)["body"]
        unused |= {group for group, *_ in body["unused"]}
        for group, attempt, segment, _, digest in body["groups"]:
            if group in trained:
                where = f"iterations {trained[group]} and {body['iteration']}"
                problems.append(f"group {group} is trained twice, in {where}")
            trained[group] = body["iteration"]
            known = sealed.get(group)
            expected = [(attempt, verdict, segment, digest) for verdict in ("kept", "spare")]
            if known not in expected:
                problems.append(f"iteration {body['iteration']} trains other rows of group {group}")
    found = {path.parent.name for path in (run / "iterations").glob("*/ledger.json")}
    for k in range(iterations):
        if f"{k:06d}" not in found:
            problems.append(f"iteration {k} was not trained")
        elif not (run / f"iterations/{k:06d}/sync.json").is_file():
            problems.append(f"the weights after iteration {k} were not published")
    if len(found) > iterations:
        problems.append(f"{len(found)} iterations were trained, {iterations} were asked for")
    kept = {group for group, entry in sealed.items() if entry[1] == "kept"}
    for group in sorted(kept - trained.keys() - unused):
        problems.append(f"group {group} is lost: it is finished and was not trained")


def _ledgers(run: Path, iterations: int, audit: StoreAudit) -> None:
    """Recomputes the chain of states."""
    state = None
    for k in range(iterations):
        folder = run / f"iterations/{k:06d}"
        if not (folder / "ledger.json").is_file():
            return
        body = _document(folder / "ledger.json", audit.problems)["body"]
        if body["batch"] != _document(folder / "batch.json", audit.problems)["digest"]:
            audit.problems.append(f"ledger {k} was trained on another batch")
        if state is not None and body["parent"] != state:
            audit.problems.append(f"ledger {k} does not follow the one before")
        if body["state"] != _sha256(["iteration", body["parent"], body["batch"], body["numeric"]]):
            audit.problems.append(f"ledger {k} has a state that does not follow from what it names")
        state = body["state"]
        audit.final_weights = body["result"]["steps"][-1]["weights_digest"]


def _lost(
    seen: Sequence[Acknowledged],
    finished: dict[int, list[Finished]],
    sealed: Sealed,
    problems: list[str],
) -> None:
    """What was finished at an earlier moment must be what was sealed."""
    for moment in seen:
        for group, before in moment.items():
            if before not in finished.get(group, []):
                problems.append(f"group {group} is lost: it stood in {before.part} at a kill")
            elif sealed.get(group, ())[:2] != (before.attempt, before.verdict):
                problems.append(f"group {group} was finished at a kill, another attempt is sealed")


def _unequal(mine: Any, other: Any) -> list[str]:
    """Names of what differs, at the first level."""
    if not (isinstance(mine, dict) and isinstance(other, dict)):
        return ["everything"]
    return sorted(key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key))


def _document(path: Path, problems: list[str]) -> dict[str, Any]:
    document = json.loads(path.read_text())
    if _sha256(document["body"]) != document["digest"]:
        problems.append(f"{path.parent.name}/{path.name} does not have the digest it names")
    return document


def _sha256(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
