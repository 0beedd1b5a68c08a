"""`slime rescore RUN --custom-rm-path FILE_OR_MODULE`: grade stored samples again."""

from __future__ import annotations

import asyncio

from flows.cli.replay import parse_range
from flows.cli.stored import open_run, parser, show
from slime_core.config.flags import parse
from slime_core.errors import ConfigError
from slime_core.rewards.hub import RewardHub, RewardSettings
from slime_core.run.rescore import SPARED, Rescored, rescore
from slime_core.store.cache import NodeCache
from slime_core.store.compaction import lost_planes
from slime_core.store.planes import in_words
from slime_core.store.seal import list_dropped, list_seals


def main(arguments: list[str]) -> int:
    """Stores an overlay for each segment and reports what changes."""
    made = parser("rescore", __doc__)
    made.add_argument("--segments", metavar="A:B", help="A to B - 1; by default all")
    made.add_argument("--custom-rm-path", metavar="PATH", help="async reward(args, sample)")
    made.add_argument("--rm-type", help="a built-in grader")
    made.add_argument("--reward-key", help="entry of dict rewards to compare")
    options = parse(made, arguments)
    if not (options.custom_rm_path or options.rm_type):
        raise ConfigError("slime rescore: give --custom-rm-path or --rm-type")
    _, cache = open_run(options, write=True)
    dropped = list_dropped(cache.backend)
    sealed = [segment for segment in list_seals(cache.backend) if segment not in dropped]
    chosen = parse_range(options.segments or ":", max(sealed, default=-1) + 1) if sealed else ()
    chosen = [segment for segment in sealed if segment in chosen]
    _refuse_lost(cache, chosen)
    settings = RewardSettings(
        rm_type=options.rm_type,
        custom_rm_path=options.custom_rm_path,
        reward_key=options.reward_key,
    )
    found = asyncio.run(_rescored(cache, settings, chosen))
    show([one.to_dict() for one in found], options.json)
    return 0


def _refuse_lost(cache: NodeCache, segments: list[int]) -> None:
    """Refuses before anything is graded what could be graded in part only."""
    lost = {s for s in segments if set(lost_planes(cache, s)) - set(SPARED)}
    if lost:
        raise ConfigError(
            f"the media of segments {in_words(lost)} were given up (slime gc --drop-planes), and "
            "graders get whole samples: choose others with --segments A:B"
        )


async def _rescored(
    cache: NodeCache, settings: RewardSettings, segments: list[int]
) -> list[Rescored]:
    hub = RewardHub(settings)
    try:
        return [await rescore(cache, hub, segment) for segment in segments]
    finally:
        await hub.close()
