"""Prompts files: every row that can be read within a time limit, and one rendered prompt."""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

from slime_core.check.findings import Findings
from slime_core.data.readers import ReadCounts, Row, is_parquet, parse_data_path, read_rows
from slime_core.data.render import render_chat
from slime_core.data.sources import SourceSettings, row_problem, sample_from_row
from slime_core.errors import DataError
from slime_core.near import nearest
from slime_core.store.urls import open_stream

LONGEST_ROWS = 4
LOOK_AT_TIME_ROWS = 64
ROWS_WITHOUT_KEY = 100
SHOWN_KEYS = 12


@dataclass
class Scan:
    """What was seen of one prompts file.

    Attributes:
        rows: good rows that were read.
        complete: the whole file was read; the run itself reads the rest when it starts.
        first: the first good row.
        longest: rows with the most characters, the likely ones with the most tokens.
        graders: names of graders that rows choose in their metadata.
        chat: a generate function takes messages, so they need not be rendered beforehand.
    """

    spec: str
    settings: SourceSettings
    rows: int = 0
    complete: bool = True
    first: Row | None = None
    longest: list[Row] = field(default_factory=list)
    graders: set[str] = field(default_factory=set)
    labels: int = 0
    chat: bool = False


@dataclass(frozen=True)
class Keys:
    """Names of the fields that choose keys, for messages."""

    where: str
    input_key: str
    label_key: str


def scan(spec: str, settings: SourceSettings, keys: Keys, limit_s: float) -> Scan:
    """Reads a prompts file until its end or the time limit.

    Raises:
        DataError: the file or a row cannot be used; names file, row and the fix.
    """
    found, counts = Scan(spec, settings), ReadCounts()
    ends_s = time.monotonic() + limit_s
    order, heap = count(), []
    try:
        for row in _good_rows(spec, settings, keys, counts):
            found.rows += 1
            found.first = found.first or row
            _note(found, row, settings)
            size = _characters(row.values[settings.input_key])
            entry = (size, next(order), row)
            if len(heap) < LONGEST_ROWS:
                heapq.heappush(heap, entry)
            elif size > heap[0][0]:
                heapq.heapreplace(heap, entry)
            if found.rows % LOOK_AT_TIME_ROWS == 0 and time.monotonic() > ends_s:
                found.complete = False
                break
    except DataError as error:
        raise DataError(f"{keys.where}: {error}") from error
    if not found.rows:
        raise DataError(f"{keys.where}: {spec} holds no prompts: {_why_none(spec, counts)}")
    found.longest = [row for _, _, row in sorted(heap, reverse=True)]
    return found


def rendered(row: Row, found: Scan, tokenizer: Any) -> tuple[str, list[int]]:
    """The text and token ids of the prompt of a scan's row.

    Raises:
        DataError: it cannot be rendered, or has no tokens.
    """
    sample = sample_from_row(row, found.settings, tokenizer)
    prompt = sample.prompt
    if not isinstance(prompt, str) and found.chat:
        options = sample.apply_chat_template_kwargs
        tools = sample.metadata.get("tools")
        prompt = render_chat(tokenizer, prompt, tools=tools, template_kwargs=options)
    if not isinstance(prompt, str):
        raise DataError(
            f"{row.where}: the prompt is a list of messages: set apply_chat_template to render it"
        )
    tokens = tokenizer.encode(prompt, add_special_tokens=False)
    if not tokens:
        raise DataError(f"{row.where}: the prompt has no tokens")
    return prompt, tokens


def show_prompt(found: Scan, tokenizer: Any, findings: Findings) -> bool:
    """Renders the first row for the report; False where that is impossible."""
    if found.first is None or tokenizer is None:
        return False
    row = found.first
    shown = findings.attempt(lambda: rendered(row, found, tokenizer))
    if shown is not None:
        findings.fact("data", first_prompt=shown[0], first_prompt_tokens=len(shown[1]))
    return shown is not None


def _why_none(spec: str, counts: ReadCounts) -> str:
    if counts.bad:
        return counts.bad[0]
    if parse_data_path(spec).sliced:
        return "the slice is empty"
    return "only blank lines" if counts.blank else "the file is empty"


def _good_rows(
    spec: str, settings: SourceSettings, keys: Keys, counts: ReadCounts
) -> Iterator[Row]:
    """Rows that can be prompts; a bad one counts, and raises beyond max_bad_rows."""
    path = parse_data_path(spec)
    unit = "row" if is_parquet(path.path) else "line"
    asked = False
    bad = settings.max_bad_rows
    for row in read_rows(path, max_bad_rows=bad, counts=counts, opener=open_stream):
        problem = row_problem(row, settings)
        if problem is None:
            yield row
            continue
        if not asked:
            _keys_of_the_file(spec, row, settings, keys)
            asked = True
        counts.add_bad(f"{path.path}, {unit} {row.number}: {problem}", settings.max_bad_rows)


def _keys_of_the_file(spec: str, bad: Row, settings: SourceSettings, keys: Keys) -> None:
    """Raises DataError where a key is missing in all rows, not in this one alone."""
    wanted = [(settings.input_key, keys.input_key), (settings.label_key, keys.label_key)]
    for key, field_name in wanted:
        if key is None or key in bad.values:
            continue
        rows = islice(
            read_rows(spec, max_bad_rows=sys.maxsize, opener=open_stream), ROWS_WITHOUT_KEY
        )
        if any(key in row.values for row in rows):
            continue
        names = [str(name) for name in bad.values]
        close = nearest(key, names)
        flag = "--" + field_name.replace("_", "-")
        fix = f"set {flag} {close}" if close else f"choose one of them with {flag}"
        listed = ", ".join(names[:SHOWN_KEYS]) or "no keys"
        raise DataError(
            f"no row of {spec} has the key {key!r} ({field_name}); the rows have {listed}: {fix}"
        )


def _note(found: Scan, row: Row, settings: SourceSettings) -> None:
    if settings.label_key and row.values.get(settings.label_key) is not None:
        found.labels += 1
    metadata = row.values.get(settings.metadata_key)
    if isinstance(metadata, dict) and metadata.get("rm_type"):
        found.graders.add(str(metadata["rm_type"]))


def _characters(prompt: Any) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(message.get("content", ""))) for message in prompt)
