"""Files with the samples of an iteration, in the form in which slime dumps them for debugging.

The store holds every sample anyway; these are for what reads slime's files, and for training on
samples that were generated elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_core.errors import DataError, StoreError
from slime_core.rollout.handed_out import Group, HandedOut, grouped
from slime_core.sample import Sample
from slime_core.store.cache import NodeCache
from slime_core.store.parts import KEPT
from slime_core.store.seal import Seal, open_groups

REBUILD: Any = np.zeros(1).__reduce__()[0]  # what a pickled array names
NUMPY: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    np.ndarray,
    np.dtype,
    REBUILD,
    *(type(np.dtype(name)) for name in ("uint8", "uint16", "int32", "int64", "float32", "float64")),
]
"""Classes of arrays of numbers, which a dump may hold besides plain data."""


def path_of(template: str, iteration: int) -> Path:
    """The file of an iteration; `{rollout_id}` stands for its number.

    Raises:
        DataError: the template has another placeholder.
    """
    try:
        return Path(template.format(rollout_id=iteration))
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(f"{template}: {{rollout_id}} is all that can stand in it") from error


def write_dump(template: str, iteration: int, samples: Sequence[Sample]) -> Path:
    """Writes the file whole or not at all.

    Raises:
        StoreError: it cannot be written.
    """
    path = path_of(template, iteration)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    content = {"rollout_id": iteration, "samples": [sample.to_dict() for sample in samples]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, temporary)
        temporary.replace(path)
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}") from error
    return path


def dump_segment(cache: NodeCache, seal: Seal, template: str) -> None:
    """Writes the kept samples of a segment, unless their file is there."""
    if path_of(template, seal.segment).exists():
        return
    groups = [group for group in seal.groups if group.entry.verdict == KEPT]
    files = open_groups(cache, groups)
    places = (files[group.entry.group_id, group.entry.attempt] for group in groups)
    samples = [one for file, batch in places for one in file.rows(batch).to_samples()]
    write_dump(template, seal.segment, samples)


def read_dump(template: str, iteration: int) -> list[Sample]:
    """The samples of a file, of slime or of `write_dump`. Nothing in it can run.

    Raises:
        DataError: there is none, it is something else, or it holds objects that are no data.
    """
    path = path_of(template, iteration)
    try:
        with torch.serialization.safe_globals(NUMPY):
            content = torch.load(path, map_location="cpu", weights_only=True)
        return [Sample.from_dict(dict(one)) for one in content["samples"]]
    except FileNotFoundError as error:
        raise DataError(f"{path} is not there: iteration {iteration} needs it") from error
    except Exception as error:  # a pickle that is damaged fails in any way
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"{path} is no dump of samples that is safe to read: {first}") from error


def generate_rollout(
    args: Any, rollout_id: int, data_source: HandedOut, evaluation: bool = False
) -> list[Group]:
    """A whole rollout function that takes each iteration from its file.

    What was logged before, by an owner that ended while it stored this file, comes out of the
    file in the same order.

    Raises:
        DataError: the file does not hold what is wanted.
    """
    groups = grouped(read_dump(args.load_debug_rollout_data, rollout_id))
    unfinished = data_source.get_buffer_length()
    if not unfinished:
        return groups
    logged = data_source.get_samples(unfinished)
    for drawn, group in zip(logged, groups[-unfinished:], strict=True):
        if drawn[0].prompt != group[0].prompt:
            raise DataError(
                f"the file of iteration {rollout_id} holds other prompts than when this iteration "
                "was begun: bring the old one back"
            )
        for sample in group:
            sample.group_index = drawn[0].group_index
    return groups[-unfinished:]
