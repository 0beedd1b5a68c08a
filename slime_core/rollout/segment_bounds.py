"""What a segment begins with and what it is closed with: both follow from the store alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime_core.rollout.draw_log import DrawLog
from slime_core.rollout.progress import Progress
from slime_core.sample import Sample
from slime_core.store.cache import NodeCache
from slime_core.store.draws import Draw
from slime_core.store.parts import ABORTED
from slime_core.store.seal import Seal, Segment, StoredGroup, open_groups, read_seal


@dataclass(frozen=True)
class Closed:
    """A decided segment: the groups it holds, and the draws that the next one begins with."""

    segment: Segment
    returned: list[tuple[int, int]]


def begun(
    cache: NodeCache, log: DrawLog, segment: int, mask_prefixes: bool
) -> tuple[list[Draw], dict[int, Sequence[Sample]]]:
    """The draws of a segment, those that came back from the one before first.

    Args:
        mask_prefixes: leave what earlier weights produced out of the loss.

    Returns:
        The draws by group id, and what an earlier segment kept of some groups, by group id.
    """
    before = read_seal(cache.backend, segment - 1) if segment else None
    own = log.of_segment(segment)
    if before is None or not before.returned:
        return own, {}
    prefixes = _prefixes(cache, before)
    if mask_prefixes:
        for sample in (one for samples in prefixes.values() for one in samples):
            sample.loss_mask = [0] * sample.response_length
    return log.of_groups(before.returned) + own, prefixes


def close_segment(
    found: Segment, draws: Sequence[Draw], target: int, *, first_come: bool
) -> Closed | None:
    """What the seal of a segment holds; None where it is not decided yet."""
    progress = Progress(target, first_come=first_come)
    progress.begin(draw.group_id for draw in draws)
    for group_id, group in found.finished.items():
        progress.end(group_id, group.entry.verdict)
    last = progress.last
    if last is None:
        return None
    held = tuple(group for group in found.groups if group.entry.group_id <= last)
    done = progress.sealed()
    returned = [(draw.group_id, draw.segment) for draw in draws if draw.group_id not in done]
    return Closed(replace(found, groups=held), returned)


def _prefixes(cache: NodeCache, seal: Seal) -> dict[int, Sequence[Sample]]:
    """Rows of the last attempt at each group that came back with some."""
    back = {group_id for group_id, _ in seal.returned}
    latest: dict[int, StoredGroup] = {}
    for group in seal.groups:
        if group.entry.verdict == ABORTED and group.entry.group_id in back:
            latest[group.entry.group_id] = group  # attempts ascend
    files = open_groups(cache, list(latest.values()))
    return {
        group_id: file.rows(batch).to_samples() for (group_id, _), (file, batch) in files.items()
    }
