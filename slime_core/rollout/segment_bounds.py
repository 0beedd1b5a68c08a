"""What a segment begins with and what it is closed with: both follow from the store alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime_core.rollout.draw_log import DrawLog
from slime_core.rollout.progress import Progress
from slime_core.rollout.returned import Choice, Returned, read_choice
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
    """The draws of a segment, those that came back and were chosen first.

    Args:
        mask_prefixes: leave what earlier weights produced out of the loss.

    Returns:
        The draws by group id, and what an earlier segment kept of some groups, by group id.
    """
    before = read_seal(cache.backend, segment - 1) if segment else None
    own = log.of_segment(segment)
    chosen = chosen_of(cache, segment, before).begun
    if not chosen:
        return own, {}
    prefixes = kept_prefixes(cache, segment, chosen)
    if mask_prefixes:
        for sample in (one for samples in prefixes.values() for one in samples):
            sample.loss_mask = [0] * sample.response_length
    return log.of_groups(chosen) + own, prefixes


def drawn(cache: NodeCache, log: DrawLog, segment: int) -> list[Draw]:
    """The draws that `begun` gives, without their samples."""
    before = read_seal(cache.backend, segment - 1) if segment else None
    chosen = chosen_of(cache, segment, before).begun
    own = log.of_segment(segment, samples=False)
    return log.of_groups(chosen, samples=False) + own if chosen else own


def chosen_of(cache: NodeCache, segment: int, before: Seal | None) -> Choice:
    """What of the groups that came back begins in a segment: all, where nobody chose."""
    choice = read_choice(cache.backend, segment, before)
    if choice is not None:
        return choice
    assert before is not None
    return Choice(before.returned)


def close_segment(
    found: Segment,
    draws: Sequence[Draw],
    target: int,
    *,
    first_come: bool,
    waiting: Returned = (),
) -> Closed | None:
    """What the seal of a segment holds; None where it is not decided yet.

    Args:
        waiting: what came back and did not begin in it either.
    """
    progress = Progress(target, first_come=first_come)
    progress.begin(draw.group_id for draw in draws)
    for group_id, group in found.finished.items():
        progress.end(group_id, group.entry.verdict)
    last = progress.last
    if last is None:
        return None
    held = tuple(group for group in found.groups if group.entry.group_id <= last)
    done = progress.sealed()
    undone = [(draw.group_id, draw.segment) for draw in draws if draw.group_id not in done]
    returned = sorted([*waiting, *undone])
    return Closed(replace(found, groups=held), returned)


def kept_prefixes(cache: NodeCache, segment: int, wanted: Returned) -> dict[int, Sequence[Sample]]:
    """Rows of the last attempt at each of these groups that earlier segments kept some of."""
    latest: dict[int, StoredGroup] = {}
    missing = dict(wanted)
    for earlier in range(segment - 1, min(missing.values(), default=segment) - 1, -1):
        seal = read_seal(cache.backend, earlier)
        for group in seal.groups if seal is not None else ():
            if group.entry.verdict == ABORTED and missing.get(group.entry.group_id, -1) >= 0:
                latest[group.entry.group_id] = group  # attempts ascend
        missing = {g: s for g, s in missing.items() if g not in latest and s < earlier}
        if not missing:
            break
    files = open_groups(cache, list(latest.values()))
    return {
        group_id: file.rows(batch).to_samples() for (group_id, _), (file, batch) in files.items()
    }
