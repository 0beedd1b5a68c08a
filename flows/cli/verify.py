"""`slime verify RUN`: read everything a run stores and check it against what was signed."""

from __future__ import annotations

import time

from flows.cli.stored import open_run, parser, show
from slime_core.config.flags import parse
from slime_core.run.audit import audit
from slime_core.store.backend import Entry
from slime_core.store.cache import NodeCache
from slime_core.store.verify import verify_run


def main(arguments: list[str]) -> int:
    """Prints what is wrong; 1 if anything is."""
    made = parser("verify", __doc__)
    made.add_argument("--rows", action="store_true", help="also digest the rows of every group")
    options = parse(made, arguments)
    run_id, cache = open_run(options)
    sizes: list[int] = []

    def count(entry: Entry) -> None:
        sizes.append(entry.size_bytes)

    start = time.monotonic()
    # Without the node cache: what the store holds is to be read, not a copy of it.
    problems = verify_run(NodeCache(cache.backend), rows=options.rows, on_object=count)
    found: dict[str, object] = {
        "run": run_id,
        "objects": len(sizes),
        "bytes": sum(sizes),
        "seconds": round(time.monotonic() - start, 3),
    }
    folder = cache.backend.local_path("run.json")
    if folder is not None and not problems:
        trail = audit(folder.parent)
        problems += trail.problems
        found |= {
            "draws": trail.draws,
            "trained": trail.trained,
            "dropped": trail.dropped,
            "unused": trail.unused,
            "open": trail.open,
        }
    if options.json:
        show([{**found, "problems": problems}], as_json=True)
    else:
        show([found], as_json=False)
        for problem in problems:
            print(f"bad: {problem}")
        print(f"{len(problems)} problems" if problems else "sound")
    return 1 if problems else 0
