"""Where things stand below a run. Names only: nothing is opened here."""

from __future__ import annotations

import re
from dataclasses import dataclass

RUN = "run.json"
CONFIGS = "configs/"
EPOCHS = "epochs/"
DRAWS = "draws/"
GROUPS = "groups/"
ITERATIONS = "iterations/"
EVALS = "evals/"
SCORES = "scores/"
SESSIONS = "sessions/"
CHECKPOINTS = "checkpoints/"
QUARANTINE = "quarantine/"

MOST_NUMBER = 999_999
"""The last iteration whose keys sort like numbers."""

_PART = re.compile(r"groups/(\d{6,})/(\d{6,})-(\d{6,})-([0-9a-f]{32})\.arrow")
_COMPACT = re.compile(r"groups/(\d{6,})/compact-([0-9a-f]{32})\.arrow")
_DROPPED = re.compile(r"groups/(\d{6,})/dropped\.json")
_DRAWS = re.compile(r"draws/(\d{6,})\.arrow")
_EPOCH = re.compile(r"epochs/(\d{6,})(\.json|\.ended|\.alive-(\d{6,}))")
_MANIFEST = re.compile(r"checkpoints/(\d{6,})-(\d{6,})/manifest\.json")
_TURN = re.compile(r"sessions/(\d{6,})/.*\.json")
_SEAL = re.compile(r"groups/(\d{6,})/seal\.json")
_ITERATION = re.compile(r"iterations/(\d{6,})/(batch|ledger|sync)\.json")


def number(value: int) -> str:
    """Six digits at least, so that names sort like numbers."""
    if value < 0:
        raise ValueError(f"{value} cannot stand in a key")
    return f"{value:06d}"


def config(numeric_digest: str) -> str:
    """The configuration that iterations with this numeric digest were trained with."""
    return f"{CONFIGS}{numeric_digest}.json"


def epoch(epoch: int) -> str:
    return f"{EPOCHS}{number(epoch)}.json"


def alive(epoch: int, beat: int) -> str:
    """The owner's sign of life number `beat`; the one before is deleted after it."""
    return f"{EPOCHS}{number(epoch)}.alive-{number(beat)}"


def ended(epoch: int) -> str:
    """Says that the owner came to a clean end."""
    return f"{EPOCHS}{number(epoch)}.ended"


def draws(seq: int) -> str:
    return f"{DRAWS}{number(seq)}.arrow"


def segment(segment: int) -> str:
    """The folder of a segment's parts and seal."""
    return f"{GROUPS}{number(segment)}/"


def part(segment: int, epoch: int, seq: int, checksum: str) -> str:
    return f"{GROUPS}{number(segment)}/{number(epoch)}-{number(seq)}-{checksum}.arrow"


def seal(segment: int) -> str:
    return f"{GROUPS}{number(segment)}/seal.json"


def returned(segment: int) -> str:
    """Which of the groups that came back a segment begins with, where that was chosen."""
    return f"{GROUPS}{number(segment)}/returned.json"


def compact(segment: int, checksum: str) -> str:
    """All groups of a sealed segment in one compressed file, instead of its parts."""
    return f"{GROUPS}{number(segment)}/compact-{checksum}.arrow"


def dropped(segment: int) -> str:
    """Says that the rows of a sealed segment were given up."""
    return f"{GROUPS}{number(segment)}/dropped.json"


def scores(scorer: str, segment: int) -> str:
    return f"{SCORES}{scorer}/{number(segment)}.arrow"


def sessions(segment: int) -> str:
    """The folder of what agents said in a segment, until it is sealed."""
    return f"{SESSIONS}{number(segment)}/"


def session(segment: int, group: int, attempt: int, index: int, ordinal: int) -> str:
    """What the names of a session's turns begin with. `ordinal` counts the sessions of a sample."""
    names = (number(group), number(attempt), number(index), number(ordinal))
    return f"{sessions(segment)}{'-'.join(names)}-"


def turn(session: str, seq: int, epoch: int) -> str:
    return f"{session}{number(seq)}-{number(epoch)}.json"


def session_of_turn(key: str) -> str:
    """The session that a turn belongs to, as `session` names it."""
    return key.rsplit("-", 2)[0] + "-"


def batch(iteration: int) -> str:
    return f"{ITERATIONS}{number(iteration)}/batch.json"


def ledger(iteration: int) -> str:
    return f"{ITERATIONS}{number(iteration)}/ledger.json"


def sync(iteration: int) -> str:
    return f"{ITERATIONS}{number(iteration)}/sync.json"


def evaluation(version: str, dataset: str, suffix: str = "json") -> str:
    return f"{EVALS}{version}/{dataset}.{suffix}"


def checkpoint(iteration: int, epoch: int) -> str:
    """The folder of a checkpoint. `epoch` keeps two owners' files apart."""
    return f"{CHECKPOINTS}{number(iteration)}-{number(epoch)}/"


def manifest(iteration: int, epoch: int) -> str:
    return f"{checkpoint(iteration, epoch)}manifest.json"


def quarantine(key: str) -> str:
    return f"{QUARANTINE}{key}"


@dataclass(frozen=True, order=True)
class PartName:
    """What a part's key says. Parts sort by owner, then by order of writing."""

    segment: int
    epoch: int
    seq: int
    checksum: str

    @property
    def key(self) -> str:
        return part(self.segment, self.epoch, self.seq, self.checksum)


@dataclass(frozen=True, order=True)
class CompactName:
    """What the key of a compacted segment says."""

    segment: int
    checksum: str

    @property
    def key(self) -> str:
        return compact(self.segment, self.checksum)


def parse_compact(key: str) -> CompactName | None:
    """Reads the key of a compacted segment, None for any other."""
    match = _COMPACT.fullmatch(key)
    return CompactName(int(match[1]), match[2]) if match else None


def parse_dropped(key: str) -> int | None:
    """The segment whose rows were given up, None for any other key."""
    match = _DROPPED.fullmatch(key)
    return int(match[1]) if match else None


def parse_part(key: str) -> PartName | None:
    """Reads a part's key, None for any other."""
    match = _PART.fullmatch(key)
    if match is None:
        return None
    return PartName(int(match[1]), int(match[2]), int(match[3]), match[4])


def parse_draws(key: str) -> int | None:
    """The number of a file of draws, None for any other key."""
    match = _DRAWS.fullmatch(key)
    return int(match[1]) if match else None


def parse_epoch(key: str) -> tuple[int, str] | None:
    """(epoch, `owner`, `ended` or `alive`), None for any other key."""
    match = _EPOCH.fullmatch(key)
    if match is None:
        return None
    kind = {".json": "owner", ".ended": "ended"}.get(match[2], "alive")
    return int(match[1]), kind


def parse_seal(key: str) -> int | None:
    """The segment a seal closes, None for any other key."""
    match = _SEAL.fullmatch(key)
    return int(match[1]) if match else None


def parse_turn(key: str) -> int | None:
    """The segment of a recorded turn, None for any other key."""
    match = _TURN.fullmatch(key)
    return int(match[1]) if match else None


def parse_iteration(key: str) -> tuple[int, str] | None:
    """(iteration, `batch`, `ledger` or `sync`), None for any other key."""
    match = _ITERATION.fullmatch(key)
    return (int(match[1]), match[2]) if match else None


def parse_manifest(key: str) -> tuple[int, int] | None:
    """(iteration, epoch) of a checkpoint's manifest, None for any other key."""
    match = _MANIFEST.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None
