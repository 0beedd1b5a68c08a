"""Answers to a configuration's own prompts, for the trial of a reward function."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

from slime_core.config.tree import RunConfig
from slime_core.contracts.example import ANSWERS, CharTokenizer, respond
from slime_core.data.readers import read_rows
from slime_core.data.sources import row_problem, sample_from_row
from slime_core.errors import DataError
from slime_core.rollout.source_of_run import own_source, source_settings
from slime_core.sample import Sample, Status
from slime_core.store.urls import open_stream

LOOKED_AT = 64
ANSWERED = "its label, the label of another one, empty, 15 kB"


def own_group(config: RunConfig) -> tuple[str, list[Sample]] | None:
    """A finished group of the first prompt; see ANSWERED.

    Returns:
        (where the prompt stands, samples); None where there are no labels or no file of prompts.

    Raises:
        DataError: the prompt cannot be used.
    """
    given = config.data.prompt_data
    if not given or not config.data.label_key or own_source(config) is not None:
        return None
    spec = given if isinstance(given, str) else next(iter(given))
    settings = source_settings(config)
    rows = read_rows(spec, max_bad_rows=settings.max_bad_rows, opener=open_stream)
    found = list(islice(rows, LOOKED_AT))
    if not found:
        raise DataError(f"{spec} holds no prompts")
    first = found[0]
    if problem := row_problem(first, settings):
        raise DataError(f"{first.where}: {problem}")
    label = _text(first.values[config.data.label_key])
    others = (_text(row.values.get(config.data.label_key)) for row in found)
    other = next((text for text in others if text != label), label + "?")
    tokenizer = CharTokenizer()
    group = []
    for place, text in enumerate((label, other, "", ANSWERS[-1])):
        sample = sample_from_row(first, settings, tokenizer, group_index=0, index=place)
        respond(sample, text, tokenizer)
        sample.status = Status.COMPLETED
        group.append(sample)
    return first.where, group


def _text(label: Any) -> str:
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False, default=str)
