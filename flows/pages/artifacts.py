"""Texts of a run's artifacts: an iteration's numbers and samples, and the end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime_core.errors import MissingError, SlimeError
from slime_core.store.batch import read_batch
from slime_core.store.cache import NodeCache
from slime_core.store.codec import decode_samples
from slime_core.store.columnar import SampleBatch
from slime_core.store.load import load_groups
from slime_core.tracking.registry import find
from slime_core.words import counted

SAMPLES = 3
TEXT_MOST_CHARS = 400


@dataclass(frozen=True)
class Shown:
    """A sample as a page shows it."""

    prompt: str
    response: str
    reward: float


def key_of(kind: str, run_id: str) -> str:
    """An artifact's key: small letters, digits and dashes."""
    return f"{kind}-{re.sub(r'[^a-z0-9]+', '-', run_id.lower()).strip('-')}"


def samples_of(cache: NodeCache, k: int) -> list[Shown]:
    """The first sample of the worst, the middle and the best group of a batch.

    Raises:
        StoreError: rows are damaged.
    """
    batch = read_batch(cache.backend, k)
    if batch is None or not batch.content.groups:
        return []
    content = batch.content
    firsts, row = [], 0
    for index, group in enumerate(content.groups):
        firsts.append((float(content.raw_rewards[row]), index))
        row += group.rows
    firsts.sort()
    wanted = dict.fromkeys((0, len(firsts) // 2, len(firsts) - 1))
    picked = [firsts[place] for place in list(wanted)[:SAMPLES]]
    groups = tuple(content.groups[index] for _, index in picked)
    rows = load_groups(cache, replace(content, groups=groups))
    return [_shown(held, reward) for held, (reward, _) in zip(rows, picked, strict=True)]


def samples_or_why(cache: NodeCache, k: int) -> list[Shown] | str:
    """The samples, or a sentence why they cannot be shown: a page is no reason to end a run."""
    try:
        return samples_of(cache, k)
    except MissingError:
        return []
    except SlimeError as error:
        return str(error)


def iteration_text(k: int, metrics: dict[str, float], samples: Sequence[Shown] | str) -> str:
    """Markdown: seconds by stage, samples, then every other number with its unit and meaning."""
    times = {name: value for name, value in metrics.items() if name.endswith("_time")}
    lines = [f"# iteration {k:06d}", "", "| stage | seconds |", "|---|---:|"]
    for name, value in sorted(times.items(), key=lambda item: -item[1]):
        lines.append(f"| {name.removeprefix('perf/').removesuffix('_time')} | {value:.3f} |")
    if isinstance(samples, str):
        lines += ["", f"samples cannot be shown: {samples}"]
    elif samples:
        lines += ["", "| prompt | response | reward |", "|---|---|---:|"]
        lines += [
            f"| {_cell(one.prompt)} | {_cell(one.response)} | {one.reward:.4g} |" for one in samples
        ]
    lines += ["", "| metric | value | unit | meaning |", "|---|---:|---|---|"]
    for name in sorted(set(metrics) - set(times)):
        known = find(name)
        unit, meaning = (known.unit, known.meaning) if known else ("", "")
        lines.append(f"| {name} | {metrics[name]:.6g} | {unit} | {meaning} |")
    return "\n".join(lines)


def summary_text(run_id: str, how: str, metrics: dict[str, float], places: dict[str, str]) -> str:
    """Markdown of a run's end: where everything is, and the last numbers.

    Args:
        how: finished, interrupted or failed.
        places: name -> path or address.
    """
    done = int(metrics.get("progress/iteration", -1)) + 1
    lines = [f"# {run_id} {how} after {counted(done, 'iteration')}", "", "| where | |", "|---|---|"]
    lines += [f"| {name} | {_link(place)} |" for name, place in places.items()]
    lines += ["", "| metric | last value |", "|---|---:|"]
    lines += [f"| {name} | {metrics[name]:.6g} |" for name in sorted(metrics)]
    return "\n".join(lines)


def _shown(rows: SampleBatch, reward: float) -> Shown:
    [sample] = decode_samples(rows.rows.slice(0, 1))
    return Shown(str(sample.prompt), sample.response, reward)


def _link(place: str) -> str:
    return f"[{place}]({place})" if place.startswith(("http://", "https://")) else f"`{place}`"


def _cell(text: str) -> str:
    """Text in a table's cell: one line, nothing that Markdown or HTML would read."""
    short = text if len(text) <= TEXT_MOST_CHARS else f"{text[:TEXT_MOST_CHARS]}..."
    short = short.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    short = re.sub(r"([\\`*_\[\]])", r"\\\1", short)
    return " ".join(short.split())
