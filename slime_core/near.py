"""The known name that somebody probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LIKENESS = 0.75
"""Below it, a suggestion is more often silly than right (0 nothing in common, 1 the same)."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that is most like `name`, or the only one that continues it; None without one."""
    known = list(names)
    close = difflib.get_close_matches(name, known, n=1, cutoff=LIKENESS)
    if close:
        return close[0]
    longer = [item for item in known if len(name) > 2 and item.startswith(name)]
    return longer[0] if len(longer) == 1 else None
