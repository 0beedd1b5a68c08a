"""The classes that data sources of one's own are built from, in both of slime's forms.

`slime.rollout.data_source` has classes made with (args) that give groups; `slime.data` has classes
made with (dataset, args) that give flat lists, one sample a prompt. What a source has to remember
stands in its attributes: they are kept in the store with every draw (see source_state.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from slime_core.data.sources import Group, PromptSource, SourceSettings, epoch_permutation
from slime_core.errors import DataError
from slime_core.sample import Sample

FILE_ORDER = -1
_GIVEN: ContextVar[Dataset] = ContextVar("slime_dataset")


class Dataset:
    """Prompts of the configured files as samples, in the order of one pass.

    Attributes:
        samples: the pass as a sequence; its items are made when they are asked for.
        at_pass: which pass; part of the state of the source that has this as an attribute.
    """

    def __init__(self, prompts: PromptSource) -> None:
        self._prompts = prompts
        self.at_pass = 0
        self.samples = self

    @property
    def fingerprint(self) -> str:
        """Names the content of the files."""
        return self._prompts.fingerprint

    @property
    def counts(self) -> dict[str, int]:
        return self._prompts.counts

    def shuffle(self, epoch_id: int) -> None:
        """Goes to the order of a pass (file order without rollout_shuffle)."""
        self.at_pass = epoch_id

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        """One pending sample, or a list for a slice; always new copies."""
        if isinstance(index, slice):
            return [self._sample(place) for place in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._sample(index % len(self))

    def __iter__(self) -> Iterator[Sample]:
        return (self._sample(place) for place in range(len(self)))

    def _sample(self, place: int) -> Sample:
        sample = self._prompts.group_of(self.at_pass, place, 0)[0]
        sample.group_index = sample.index = None
        return sample


class SlimeDataset(Dataset):
    """A dataset as slime's own sources make it; `shuffle` gives slime's order of an epoch.

    Args:
        path: the file, with a slice if need be.
        tokenizer: for the chat template and `max_length`.
        max_length: most tokens of a prompt.
        prompt_key: and the other keys: where things stand in a row.

    Raises:
        DataError: the file or a row of it cannot be used.
    """

    def __init__(
        self, path: str, tokenizer: Any = None, processor: Any = None,
        max_length: int | None = None, *, prompt_key: str = "text",
        multimodal_keys: dict[str, str] | None = None, label_key: str | None = None,
        tool_key: str | None = None, metadata_key: str = "metadata", seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        settings = SourceSettings(
            input_key=prompt_key, label_key=label_key, tool_key=tool_key,
            metadata_key=metadata_key, multimodal_keys=multimodal_keys,
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=apply_chat_template_kwargs or {},
            rollout_max_prompt_len=max_length,
        )  # fmt: skip
        super().__init__(PromptSource(path, settings, tokenizer))
        self._seed = seed
        self.at_pass = FILE_ORDER
        self._order: tuple[int, list[int]] = (FILE_ORDER, [])

    def _sample(self, place: int) -> Sample:
        if self._order[0] != self.at_pass:
            mixed = self.at_pass != FILE_ORDER
            rows = epoch_permutation(len(self), self._seed, self.at_pass) if mixed else []
            self._order = (self.at_pass, rows)
        sample = self._prompts.group_of(0, (self._order[1] or range(len(self)))[place], 0)[0]
        sample.group_index = sample.index = None
        return sample


@contextmanager
def dataset_at_hand(dataset: Dataset | None) -> Iterator[None]:
    """What sources that are made inside take for the configured prompts."""
    if dataset is None:
        yield
        return
    token = _GIVEN.set(dataset)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def dataset_of(args: Any) -> Dataset | None:
    """The prompts that settings name; None without prompt_data."""
    if not getattr(args, "prompt_data", None):
        return None
    given = _GIVEN.get(None)
    if given is not None:
        return given
    names = SourceSettings.__dataclass_fields__
    found = {name: getattr(args, name) for name in names if hasattr(args, name)}
    settings = SourceSettings(**{name: value for name, value in found.items() if value is not None})
    tokenizer = None
    if settings.apply_chat_template or settings.rollout_max_prompt_len:
        from slime_core.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(args.hf_checkpoint)
    return Dataset(PromptSource(args.prompt_data, settings, tokenizer))


class DataSource:
    """What every source of groups offers. Subclasses need `get_samples` only."""

    def get_samples(self, num_samples: int) -> list[Group]:
        """The next `num_samples` groups, each of n_samples_per_prompt pending samples."""
        raise NotImplementedError(f"{type(self).__name__} needs a method get_samples")

    def add_samples(self, samples: list[Any]) -> None:
        """Takes back groups that were begun and not finished."""
        raise RuntimeError(f"{type(self).__name__} takes no samples back")

    def save(self, rollout_id: int) -> None:
        """Nothing: attributes are kept in the store with every draw."""

    def load(self, rollout_id: int | None = None) -> None:
        """Nothing: the store brings attributes back."""


class RolloutDataSource(DataSource):
    """Groups from the configured prompts, pass after pass."""

    def __init__(self, args: Any) -> None:
        self._begin(args, dataset_of(args))

    def _begin(self, args: Any, dataset: Any) -> None:
        self.args = args
        self.dataset = dataset
        self.epoch_id = 0
        self.sample_offset = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}

    def __len__(self) -> int:
        """Prompts of one pass."""
        return 0 if self.dataset is None else len(self.dataset)

    def get_samples(self, num_samples: int) -> list[Any]:
        return [self._group(prompt) for prompt in self.next_prompts(num_samples)]

    def next_prompts(self, count: int) -> list[Sample]:
        """The next prompts, over any number of passes.

        Raises:
            DataError: there are none at all.
        """
        if self.dataset is None or not len(self.dataset):
            raise DataError(
                f"{type(self).__name__} has no prompts to draw from: set prompt_data, or override "
                "get_samples"
            )
        found: list[Sample] = []
        while len(found) < count:
            if hasattr(self.dataset, "shuffle"):
                self.dataset.shuffle(self.epoch_id)
            end = min(len(self.dataset), self.sample_offset + count - len(found))
            found += [as_sample(self.dataset[i]) for i in range(self.sample_offset, end)]
            self.sample_offset = end
            if end >= len(self.dataset):
                self.epoch_id, self.sample_offset = self.epoch_id + 1, 0
        return found

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Remembers values of one's own."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def _group(self, prompt: Sample) -> Group:
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The same, serving what came back first.

    What came back is chosen by `buffer_filter` if a subclass has that method, else by
    buffer_filter_path, else the oldest first.
    """

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[Any] = []

    def add_samples(self, samples: list[Any]) -> None:
        self.buffer.extend(samples)

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def _get_samples_from_buffer(self, num_samples: int) -> list[Any]:
        """Up to `num_samples` of what came back, for subclasses that serve it themselves."""
        if not self.buffer or num_samples < 1:
            return []
        own = getattr(self, "buffer_filter", None)
        if own is not None:
            return own(self.args, self.buffer, num_samples)
        taken = self.buffer[:num_samples]
        del self.buffer[: len(taken)]
        return taken


class FlatDataSource(RolloutDataSource):
    """The form of `slime.data`: one sample a prompt, made with a dataset."""

    def __init__(self, dataset: Any, args: Any) -> None:
        self._begin(args, dataset)

    def get_samples(self, num_samples: int) -> list[Sample]:
        return self.next_prompts(num_samples)

    def add_samples(self, samples: list[Any]) -> None:
        """Nothing: what was generated is used once."""


class FlatDataSourceWithBuffer(FlatDataSource):
    """The form of `slime.data` that keeps what comes back."""

    def __init__(self, dataset: Any, args: Any) -> None:
        super().__init__(dataset, args)
        self.buffer: list[Any] = []

    def add_samples(self, samples: list[Any]) -> None:
        self.buffer.extend(samples)

    def buffer_filter(self, args: Any, buffer: Sequence[Any], num_samples: int) -> list[Any]:
        """The oldest samples."""
        return list(buffer[:num_samples])


def as_sample(item: Any) -> Sample:
    """An item of a dataset as a pending sample: a Sample, text, messages or a row with `prompt`."""
    if isinstance(item, Sample):
        return copy.deepcopy(item)
    if isinstance(item, (str, list)):
        return Sample(prompt=copy.deepcopy(item))
    if isinstance(item, dict) and ("prompt" in item or "input" in item):
        label = item.get("label")
        return Sample(
            prompt=copy.deepcopy(item["prompt"] if "prompt" in item else item["input"]),
            label=None if label is None else str(label),
            metadata=copy.deepcopy(item.get("metadata") or {}),
        )
    raise DataError(
        f"the dataset holds a {type(item).__name__}; a Sample, text, messages or a dict with "
        "`prompt` is needed"
    )
