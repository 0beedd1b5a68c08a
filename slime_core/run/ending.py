"""How the last process of a run ended, kept beside its logs for whoever could not be told then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, cast

Ending = Literal["finished", "interrupted", "failed"]
FILE = "ended.json"


def note_end(local: Path, shown_as: str, how: str) -> None:
    """Keeps how a run ended.

    Args:
        local: the run's folder on this machine.
        shown_as: where it was shown: id of its flow run.
        how: finished, interrupted or failed.
    """
    temporary = local / f"{FILE}.new"
    temporary.write_text(json.dumps({"shown_as": shown_as, "how": how}))
    temporary.replace(local / FILE)


def noted_end(local: Path, shown_as: str) -> Ending | None:
    """How the run ended that was shown there; None where nobody noted it."""
    try:
        note = json.loads((local / FILE).read_text())
    except (OSError, ValueError):
        return None
    return cast(Ending, note["how"]) if note["shown_as"] == shown_as else None
