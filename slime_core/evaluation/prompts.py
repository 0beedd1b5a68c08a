"""The prompts of an evaluation dataset as pending samples."""

from __future__ import annotations

import copy
from typing import Any

from slime_core.data.readers import Opener, open_local
from slime_core.data.sources import Group, PromptSource, SourceSettings
from slime_core.evaluation.datasets import EvalDataset


def open_prompts(
    dataset: EvalDataset, tokenizer: Any, *, max_bad_rows: int = 0, opener: Opener = open_local
) -> PromptSource:
    """Opens a dataset's file with its own keys and template.

    Raises:
        DataError: file or row cannot be used.
    """
    settings = SourceSettings(
        input_key=dataset.input_key,
        label_key=dataset.label_key,
        metadata_key=dataset.metadata_key,
        tool_key=dataset.tool_key,
        multimodal_keys=dataset.multimodal_keys or {},
        apply_chat_template=dataset.apply_chat_template,
        apply_chat_template_kwargs=dataset.apply_chat_template_kwargs,
        n_samples_per_prompt=dataset.n_samples_per_eval_prompt,
        rollout_max_prompt_len=dataset.max_prompt_len,
        max_bad_rows=max_bad_rows,
    )
    return PromptSource(dataset.path, settings, tokenizer, opener)


def one_pass(dataset: EvalDataset, source: PromptSource) -> list[Group]:
    """Each prompt once, in file order, with the dataset's overrides.

    A sample's own function paths win over the dataset's.
    """
    groups = [source.group_of(0, position, position) for position in range(len(source))]
    for group in groups:
        for sample in group:
            sample.metadata |= copy.deepcopy(dict(dataset.metadata_overrides))
            sample.generate_function_path = (
                sample.generate_function_path or dataset.custom_generate_function_path
            )
    return groups
