"""Where prompts come from: draws that are a pure function of counters.

A draw is named by (data_epoch, position); which row it means follows from the seed, so the whole
state of a source is a few integers.
"""

from __future__ import annotations

import copy
import json
import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

from slime_core.data.mixture import Mixture
from slime_core.data.readers import Opener, Row, open_local
from slime_core.data.render import (
    encode,
    media_items,
    parse_tools,
    place_media,
    prompt_to_messages,
    render_chat,
)
from slime_core.data.table import RowTable
from slime_core.errors import DataError
from slime_core.sample import Sample

Group = list[Sample]
NO_PASS = -1
"""The data_epoch of groups that come from no file."""


@dataclass(frozen=True)
class SourceSettings:
    """How rows become samples; the names are the flags'.

    Attributes:
        default_tools: JSON schemas of tools for rows that name none.
    """

    input_key: str = "input"
    prompt_data_weights: Sequence[float] | None = None
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str | None = "tools"
    multimodal_keys: Mapping[str, str] | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    n_samples_per_prompt: int = 1
    rollout_shuffle: bool = False
    rollout_seed: int = 42
    rollout_max_prompt_len: int | None = None
    max_bad_rows: int = 0
    default_tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Draw:
    """A prompt taken from the source.

    Attributes:
        data_epoch: passes over the data before this one.
        position: place in the order of this pass.
        group_index: counter over the run.
        samples: the group, [n_samples_per_prompt], all pending.
        state_after: the source's state once this draw is taken; None where that stands with a later
            one that was taken together with it, or where the source cannot say it.
    """

    data_epoch: int
    position: int
    group_index: int
    samples: Group
    state_after: dict[str, Any] | None


def epoch_permutation(rows: int, seed: int, data_epoch: int) -> list[int]:
    """The order of rows in one pass: the same as slime's shuffle, on a private generator."""
    order = list(range(rows))
    random.Random(seed + data_epoch).shuffle(order)
    return order


class DrawSource(Protocol):
    """What the log of draws asks of a source."""

    def draw(self, count: int) -> list[Draw]:
        """Takes the next `count` groups."""
        ...

    def numbered(self, groups: Sequence[Group]) -> list[Draw]:
        """Groups from elsewhere as draws, with the next numbers."""
        ...

    def state(self) -> dict[str, Any] | None:
        """For `restore`; None where `replay` has to do."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes back to a state."""
        ...

    def replay(self, logged: Iterable[Sequence[Any]]) -> None:
        """Goes, from its beginning, to the place after all that is logged."""
        ...


class PromptSource:
    """Draws prompts from files, pass after pass, and wraps them as groups of samples.

    Attributes:
        fingerprint: names the content of the files.
        dropped_long: rows left out since their prompt exceeds rollout_max_prompt_len tokens.
    """

    def __init__(
        self,
        prompt_data: str | list[str],
        settings: SourceSettings,
        tokenizer: Any = None,
        opener: Opener = open_local,
    ) -> None:
        """Opens and checks the files.

        Args:
            prompt_data: one path or several, `path@[a:b]` for a part.
            settings: keys, template, seed.
            tokenizer: needed for chat templates and the length filter.
            opener: opens a path for bytes.

        Raises:
            DataError: a file or row cannot be used; names file, row and the fix.
        """
        if settings.n_samples_per_prompt < 1:
            raise DataError("n_samples_per_prompt must be at least 1")
        needs_tokenizer = settings.apply_chat_template or settings.rollout_max_prompt_len
        if needs_tokenizer and tokenizer is None:
            raise DataError("a chat template or a prompt length limit needs a tokenizer")
        self.settings = settings
        self.dropped_long = 0
        self._tokenizer = tokenizer
        self._table = RowTable(
            prompt_data,
            check=lambda row: row_problem(row, settings),
            max_bad_rows=settings.max_bad_rows,
            opener=opener,
        )
        self._kept = self._short_rows()
        self._mixture, self._starts = self._mixed()
        self._data_epoch = self._position = self._groups = 0

    @property
    def fingerprint(self) -> str:
        return self._table.fingerprint

    @property
    def counts(self) -> dict[str, int]:
        """Rows, blank lines, bad and over-long rows: metrics of the data."""
        return {
            "rows": len(self),
            "blank": self._table.counts.blank,
            "bad": len(self._table.counts.bad),
            "too_long": self.dropped_long,
        }

    def __len__(self) -> int:
        """Prompts in one pass."""
        return len(self._table) if self._kept is None else len(self._kept)

    def draw(self, count: int) -> list[Draw]:
        """Takes the next `count` prompts, over any number of passes."""
        draws = []
        for _ in range(count):
            data_epoch, position, group = self._data_epoch, self._position, self._groups
            samples = self.group_of(data_epoch, position, group)
            self._groups += 1
            self._position += 1
            if self._position == len(self):
                self._data_epoch, self._position = data_epoch + 1, 0
            draws.append(Draw(data_epoch, position, group, samples, self.state()))
        return draws

    def get_samples(self, num_samples: int) -> list[Group]:
        """The next `num_samples` groups, in slime's words."""
        return [draw.samples for draw in self.draw(num_samples)]

    def group_of(self, data_epoch: int, position: int, group_index: int) -> Group:
        """The samples of any draw, past or future; changes nothing."""
        row = self._table[self._row_index(data_epoch, position)]
        n = self.settings.n_samples_per_prompt
        return [
            sample_from_row(
                row,
                self.settings,
                self._tokenizer,
                group_index=group_index,
                index=group_index * n + i,
            )
            for i in range(n)
        ]

    def numbered(self, groups: Sequence[Group]) -> list[Draw]:
        """Groups that somebody else made (a rollout function) as draws; they are of no pass."""
        draws = []
        for group in groups:
            number = self._groups
            self._groups += 1
            for i, sample in enumerate(group):
                sample.group_index = number
                sample.index = number * self.settings.n_samples_per_prompt + i
            draws.append(Draw(NO_PASS, number, number, group, self.state()))
        return draws

    def replay(self, logged: Iterable[Sequence[Any]]) -> None:
        """Not needed: the state is always known."""
        raise DataError("the log of draws lacks the state of the data source; it is damaged")

    def state(self) -> dict[str, Any]:
        """Counters for `restore`, as JSON."""
        return {
            "data_epoch": self._data_epoch,
            "position": self._position,
            "groups": self._groups,
            "rows": len(self),
            "fingerprint": self.fingerprint,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes back to a saved state.

        Raises:
            DataError: the files have changed since, or another source drew from them.
        """
        if "fingerprint" not in state:
            raise DataError(
                f"this run drew its prompts through {state.get('source')}: set data_source_path "
                "to it again, or fork the run"
            )
        if state["fingerprint"] != self.fingerprint or state["rows"] != len(self):
            raise DataError(
                f"the prompts in {', '.join(self._table.specs)} are not those of the saved run "
                f"({state['rows']} rows then, {len(self)} now); restore the file or fork the run"
            )
        self._data_epoch, self._position = state["data_epoch"], state["position"]
        self._groups = state["groups"]

    def _mixed(self) -> tuple[Mixture | None, list[int]]:
        """The choice among weighted files, and each file's first place among the kept rows."""
        weights = self.settings.prompt_data_weights
        if weights is None:
            return None, []
        ends = list(accumulate(self._table.sizes))
        if self._kept is not None:
            ends = [bisect_left(self._kept, end) for end in ends]
        starts = [0, *ends[:-1]]
        sizes = [end - start for start, end in zip(starts, ends, strict=True)]
        for size, spec in zip(sizes, self._table.specs, strict=True):
            if not size:
                raise DataError(
                    f"all prompts of {spec} are longer than --rollout-max-prompt-len "
                    f"{self.settings.rollout_max_prompt_len}"
                )
        order = epoch_permutation if self.settings.rollout_shuffle else None
        return Mixture(sizes, weights, order, self.settings.rollout_seed), starts

    def _row_index(self, data_epoch: int, position: int) -> int:
        if self._mixture is not None:
            part, place = self._mixture.row(data_epoch, position)
            position = self._starts[part] + place
            return position if self._kept is None else self._kept[position]
        if self.settings.rollout_shuffle:
            position = _order(len(self), self.settings.rollout_seed, data_epoch)[position]
        return position if self._kept is None else self._kept[position]

    def _short_rows(self) -> list[int] | None:
        """Indices of rows within the length limit, in file order; None without a limit."""
        limit = self.settings.rollout_max_prompt_len
        if not limit:
            return None
        kept = []
        for index in range(len(self._table)):
            row = self._table[index]
            prompt = sample_from_row(row, self.settings, self._tokenizer).prompt
            text = prompt if isinstance(prompt, str) else render_chat(self._tokenizer, prompt)
            if len(encode(self._tokenizer, text)) <= limit:
                kept.append(index)
        self.dropped_long = len(self._table) - len(kept)
        if not kept:
            raise DataError(
                f"all {len(self._table)} prompts are longer than --rollout-max-prompt-len {limit}"
            )
        return kept


@lru_cache(maxsize=4)
def _order(rows: int, seed: int, data_epoch: int) -> list[int]:
    return epoch_permutation(rows, seed, data_epoch)


def row_problem(row: Row, settings: SourceSettings) -> str | None:
    """What keeps a row from being a prompt, as one sentence; None where it is good."""
    keys = [settings.input_key, *(settings.multimodal_keys or {}).values()]
    if settings.label_key:
        keys.append(settings.label_key)
    for key in keys:
        if key not in row.values:
            return f"no key {key!r}; the row has {', '.join(row.values) or 'no keys'}"
    prompt = row.values[settings.input_key]
    if prompt is None or (isinstance(prompt, (str, list)) and not prompt):
        return f"the prompt under {settings.input_key!r} is empty"
    metadata = row.values.get(settings.metadata_key)
    if metadata is not None and not isinstance(metadata, Mapping):
        return f"{settings.metadata_key!r} must be an object, not {type(metadata).__name__}"
    try:
        prompt_to_messages(prompt)
        parse_tools(row.values.get(settings.tool_key or ""))
    except DataError as error:
        return str(error)
    return None


def sample_from_row(
    row: Row,
    settings: SourceSettings,
    tokenizer: Any = None,
    *,
    group_index: int | None = None,
    index: int | None = None,
) -> Sample:
    """A pending sample with its own copies of everything mutable.

    Raises:
        DataError: the prompt cannot be rendered; names file and row.
    """
    metadata = copy.deepcopy(dict(row.values.get(settings.metadata_key) or {}))
    label = row.values.get(settings.label_key) if settings.label_key else None
    try:
        tools = parse_tools(row.values.get(settings.tool_key or ""))
        tools = tools or [dict(tool) for tool in settings.default_tools]
        if tools:
            metadata["tools"] = tools
        keys = settings.multimodal_keys or {}
        media = {kind: media_items(row.values[key]) for kind, key in keys.items()}
        prompt: Any = row.values[settings.input_key]
        messages = []
        if media or not isinstance(prompt, str) or settings.apply_chat_template:
            prompt = messages = place_media(prompt_to_messages(prompt), media)
        if settings.apply_chat_template:
            prompt = render_chat(
                tokenizer,
                messages,
                tools=tools,
                template_kwargs=settings.apply_chat_template_kwargs,
            )
            if not prompt:
                raise DataError("the chat template gave an empty prompt")
    except DataError as error:
        raise DataError(f"{row.where}: {error}") from error
    return Sample(
        group_index=group_index,
        index=index,
        prompt=prompt,
        label=label_text(label),
        metadata=metadata,
        multimodal_inputs={f"{kind}s": list(items) for kind, items in media.items()} or None,
        apply_chat_template_kwargs=dict(settings.apply_chat_template_kwargs),
    )


def label_text(label: Any) -> str | None:
    """A label as text: strings as they are, other values as JSON, NaN (a gap in a table) none."""
    if label is None or isinstance(label, str):
        return label
    if isinstance(label, float) and math.isnan(label):
        return None
    return json.dumps(label, ensure_ascii=False, default=str)
