"""What a data source of one's own has to remember, as values that the store keeps.

A source with `state_dict` and `load_state_dict` says it itself. Of any other the attributes are
kept that have changed since it was made: plain values, samples and `random.Random`. Whatever else
may change (an iterator, a connection, a very large list) cannot be kept; then there is no state,
and a resumed run brings the source to its place by asking it again for all that was drawn.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import types
from collections.abc import Mapping
from typing import Any

from slime_core.data.source_classes import Dataset
from slime_core.errors import DataError, PluginError
from slime_core.sample import Sample
from slime_core.store.values import from_json, to_json

GIVEN = ("args", "dataset", "tokenizer", "processor")
"""Attributes that the source is made with."""
MOST_ITEMS = 10_000
SAMPLE, RANDOM, PASS = "$slime_sample", "$slime_random", "$slime_pass"
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_CONSTANT = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
             type, logging.Logger, re.Pattern, *_LOCKS)  # fmt: skip


class SourceState:
    """The memory of one source.

    Args:
        source: as it was made, before anything is drawn.
        name: what messages call it.

    Attributes:
        unsaved: attributes that may change and that the store cannot keep.
    """

    def __init__(self, source: Any, name: str) -> None:
        self._source = source
        self._name = name
        self._own = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self.unsaved: list[str] = []
        self._datasets = [n for n, one in vars(source).items() if isinstance(one, Dataset)] if (
            not self._own) else []  # fmt: skip
        self._first = {} if self._own else self._marks()

    def save(self) -> dict[str, Any] | None:
        """The state as plain values; None where a part of it cannot be kept.

        Raises:
            PluginError: `state_dict` gave something that the store cannot keep.
        """
        if self._own:
            state = self._source.state_dict()
            try:
                to_json(state, f"the state_dict of {self._name}")
            except DataError as error:
                raise PluginError(str(error)) from error
            return {"own": state}
        marks = self._marks()
        if self.unsaved:
            return None
        changed = {name: text for name, text in marks.items() if text != self._first.get(name)}
        return {"attributes": changed}

    def load(self, state: Mapping[str, Any]) -> None:
        """Brings the source to a saved state.

        Raises:
            PluginError: the source was another one when that was saved.
        """
        if self._own != ("own" in state):
            raise PluginError(
                f"{self._name} kept its state in another way when this run was stored: use that "
                "version of it, or fork the run"
            )
        if self._own:
            self._source.load_state_dict(state["own"])
            return
        for name, text in {**self._first, **state["attributes"]}.items():
            value = _restored(from_json(text))
            if isinstance(value, dict) and set(value) == {PASS}:
                getattr(self._source, name).at_pass = value[PASS]
            else:
                setattr(self._source, name, value)
        for name in [n for n in vars(self._source) if n not in self._first]:
            if name not in state["attributes"] and name not in GIVEN:
                delattr(self._source, name)

    def _marks(self) -> dict[str, str]:
        """Attribute -> its value as text, of all that can be kept."""
        self.unsaved = []
        found = {}
        for name, value in vars(self._source).items():
            if isinstance(value, Dataset):  # its rows stay, its order is of a pass
                if name in self._datasets:
                    found[name] = to_json({PASS: value.at_pass}, name)
                else:  # a new source does not have it, so there is nothing to put the pass into
                    self.unsaved.append(name)
                continue
            if name in GIVEN or isinstance(value, _CONSTANT):
                continue
            try:
                found[name] = to_json(_plain(value, [MOST_ITEMS]), name)
            except DataError:
                self.unsaved.append(name)
        return found


def _plain(value: Any, room: list[int]) -> Any:
    """A value with samples and generators as dictionaries; `room` counts items down."""
    room[0] -= 1
    if room[0] < 0:
        raise DataError("too large to be kept with every draw")
    if isinstance(value, Sample):
        return {SAMPLE: value.to_dict()}
    if type(value) is random.Random:
        return {RANDOM: value.getstate()}
    if isinstance(value, (list, tuple)):
        return type(value)([_plain(item, room) for item in value]) if type(value) in (
            list, tuple) else value  # fmt: skip
    if isinstance(value, dict):
        return {key: _plain(item, room) for key, item in value.items()}
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_restored(item) for item in value])
    if isinstance(value, dict):
        if set(value) == {SAMPLE}:
            return Sample.from_dict(value[SAMPLE])
        if set(value) == {RANDOM}:
            generator = random.Random()
            generator.setstate(value[RANDOM])
            return generator
        return {key: _restored(item) for key, item in value.items()}
    return value
