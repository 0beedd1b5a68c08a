"""The data source that a configuration asks for, and its choice among groups that came back."""

from __future__ import annotations

from typing import Any

from slime_core.config.fields import values
from slime_core.config.tree import RunConfig
from slime_core.data.buffer import Select
from slime_core.data.custom_source import CustomSource
from slime_core.data.readers import Opener
from slime_core.data.source_classes import Dataset
from slime_core.data.sources import PromptSource, SourceSettings
from slime_core.rollout.returned import load_buffer_filter
from slime_core.store.urls import Fetched
from slime_core.tools.interface import load_tools

BUILT_IN = (
    "slime.rollout.data_source.RolloutDataSource",
    "slime.rollout.data_source.RolloutDataSourceWithBuffer",
)
Source = PromptSource | CustomSource


def open_source(
    config: RunConfig, args: Any, tokenizer: Any, opener: Opener | None = None
) -> Source:
    """Opens the prompts, through data_source_path where that is set.

    Raises:
        DataError: a file or row cannot be used.
        PluginError: the source cannot be loaded or made.
    """
    prompts = None
    if config.data.prompt_data is not None:
        prompts = PromptSource(
            config.data.prompt_data, source_settings(config), tokenizer, opener or Fetched()
        )
    path = own_source(config)
    if path is None and prompts is not None:
        return prompts
    dataset = Dataset(prompts) if prompts is not None else None
    return CustomSource(path or BUILT_IN[0], args, dataset, config.rollout.n_samples_per_prompt)


def own_source(config: RunConfig) -> str | None:
    """The path of a source that is not ours."""
    path = config.data.data_source_path
    return None if path in BUILT_IN else path


def source_settings(config: RunConfig) -> SourceSettings:
    """How rows become samples."""
    given = {**values(config, "identity"), **values(config, "operational")}
    names = SourceSettings.__dataclass_fields__
    tools = [tool.schema for tool in load_tools(config.rollout.tool_paths).values()]
    chosen = {name: given[name] for name in names if name in given}
    return SourceSettings(**chosen, default_tools=tools)


def select_of(config: RunConfig, args: Any, source: Source) -> Select | None:
    """Who chooses among groups that came back; None where all of them begin.

    The source's own method goes before buffer_filter_path.
    """
    own = source.select_of() if isinstance(source, CustomSource) else None
    return own or load_buffer_filter(config.rollout.buffer_filter_path, args)
