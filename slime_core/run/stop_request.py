"""The wish that a run should stop after the iteration it is in.

It is a file in the run's local folder. It names the owner that is meant, so that it does not stop
the one that takes the run up again.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = "stop-after-iteration.json"


def ask(local: Path, epoch: int) -> None:
    """Asks the owner `epoch` of the run whose local folder this is."""
    written = local / f"{FILE}.new"
    written.write_text(json.dumps({"epoch": epoch}), encoding="utf-8")
    written.replace(local / FILE)


def asked(local: Path, epoch: int) -> bool:
    """Whether this owner is asked to stop. A damaged file asks nobody."""
    try:
        content = json.loads((local / FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(content, dict) and content.get("epoch") == epoch
