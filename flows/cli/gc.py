"""`slime gc RUN`: compact rows, give old ones up, delete what nothing needs."""

from __future__ import annotations

import sys

from flows.cli.stored import open_run, parser, show
from slime_core.config.flags import FlagParser, parse
from slime_core.errors import ConfigError
from slime_core.run.epoch import Lease
from slime_core.run.retention import (
    Garbage,
    Retention,
    collect,
    find_garbage,
    settled_segments,
)
from slime_core.store.cache import NodeCache
from slime_core.store.compaction import compact_segment, holds_planes
from slime_core.store.planes import GIVEN_UP, checked
from slime_core.store.seal import list_dropped, list_seals
from slime_core.store.table_index import TableIndex

SETTLES = (
    "they may go once two final checkpoints contain what was trained on them (--save-interval)"
)


def main(arguments: list[str]) -> int:
    """Says what goes; deletes it unless this is a dry run. The run must not be in training."""
    options = parse(_parser(), arguments)
    if any(n is not None and n < 1 for n in (options.keep_last, options.keep_every)):
        raise ConfigError("--keep-last and --keep-every take numbers from 1 on")
    if options.keep_planes is not None and (options.drop_planes is None or options.keep_planes < 0):
        raise ConfigError("--keep-planes takes numbers from 0 on, beside --drop-planes")
    planes = frozenset() if options.drop_planes is None else checked(options.drop_planes.split(","))
    retention = Retention(options.keep_last, options.keep_every)
    run_id, cache = open_run(options, write=True, fsync=True)
    found: dict[str, object] = {"run": run_id}
    if options.dry_run:
        garbage = find_garbage(cache, retention, quarantined=options.quarantined)
        found |= _told(garbage) | _to_thin(cache, planes, garbage, options.keep_planes or 0)
    else:
        with Lease.acquire(cache.backend) as lease:
            garbage = find_garbage(cache, retention, quarantined=options.quarantined)
            collect(cache.backend, lease, garbage)
            found |= _told(garbage)
            if planes:
                found |= _thinned(cache, planes, options.keep_planes or 0)
            if options.compact:
                found |= _compacted(cache)
        if planes or garbage.segments:
            TableIndex(cache).forget()
    show([found], options.json)
    asked = bool(planes) or retention != Retention()
    if asked and not settled_segments(cache) and not list_dropped(cache.backend):
        print(f"note: a resume may need every row as it is: {SETTLES}", file=sys.stderr)
    return 0


def _parser() -> FlagParser:
    made = parser("gc", __doc__)
    made.add_argument("--keep-last", type=int, metavar="N", help="keep the rows of N segments")
    made.add_argument("--keep-every", type=int, metavar="N", help="keep those of every Nth, too")
    made.add_argument("--compact", action="store_true", help="compress the rows that stay")
    made.add_argument(
        "--drop-planes", metavar="P,P", help=f"empty these columns of rows: {', '.join(GIVEN_UP)}"
    )
    made.add_argument(
        "--keep-planes", type=int, metavar="N", help="not those of the newest N segments"
    )
    made.add_argument("--quarantined", action="store_true", help="delete damaged objects, too")
    made.add_argument("--dry-run", action="store_true", help="only say what would go")
    return made


def _told(garbage: Garbage) -> dict[str, object]:
    return {
        "segments_dropped": len(garbage.segments),
        "objects_deleted": len(garbage.objects),
        "bytes_deleted": garbage.size_bytes,
    }


def _compacted(cache: NodeCache) -> dict[str, object]:
    gone = list_dropped(cache.backend)
    open_ones = [s for s in list_seals(cache.backend) if s not in gone]
    done = [one for s in open_ones if (one := compact_segment(cache, s)) is not None]
    return {
        "segments_compacted": len(done),
        "bytes_before": sum(one.bytes_before for one in done),
        "bytes_after": sum(one.bytes_after for one in done),
    }


def _to_thin(
    cache: NodeCache, planes: frozenset[str], garbage: Garbage, keep_last: int
) -> dict[str, object]:
    """What a dry run says of planes: the segments whose rows hold one of them."""
    if not planes:
        return {}
    settled = [s for s in settled_segments(cache, keep_last) if s not in garbage.segments]
    return {"segments_to_thin": sum(holds_planes(cache, segment, planes) for segment in settled)}


def _thinned(cache: NodeCache, planes: frozenset[str], keep_last: int) -> dict[str, object]:
    settled = settled_segments(cache, keep_last)
    done = [one for s in settled if (one := compact_segment(cache, s, planes)) is not None]
    return {
        "segments_thinned": len(done),
        "thinned_bytes_before": sum(one.bytes_before for one in done),
        "thinned_bytes_after": sum(one.bytes_after for one in done),
    }
