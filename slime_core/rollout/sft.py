"""Supervised training: the answer comes from the data, no engine generates anything.

    slime train ... --loss-type sft_loss \\
        --custom-generate-function-path slime_core.rollout.sft.generate

A prompt of text is answered by its label (label_key). Of a list of messages (without
apply_chat_template) everything that an assistant says is trained, up to the last such message;
`step_loss_mask: 0` in a message leaves it out. Evaluations generate as ever.
"""

from __future__ import annotations

from typing import Any

from slime_core.batching.masks import response_length
from slime_core.data.loss_masks import MultiTurnLossMaskGenerator
from slime_core.data.render import encode
from slime_core.errors import DataError
from slime_core.rollout import slime_names
from slime_core.rollout.runtime import current
from slime_core.sample import Sample, Status


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Sets what the data holds as a response that is trained; reward 0.

    A response longer than rollout_max_response_len is cut and counts as truncated.

    Raises:
        DataError: the row has nothing to learn.
    """
    if evaluation:
        return await slime_names.generate(args, sample, sampling_params)
    runtime = current()
    told = _label if isinstance(sample.prompt, str) else _conversation
    prompt, response, mask = told(sample, runtime.tokenizer)
    sample.tokens = prompt
    room = max(0, runtime.sampling.left(sample))
    sample.status = Status.COMPLETED if len(response) <= room else Status.TRUNCATED
    sample.tokens = [*prompt, *response[:room]]
    sample.response_length, sample.loss_mask = len(response[:room]), mask[:room]
    sample.response = sample.label or ""
    if not isinstance(sample.prompt, str):
        sample.response = runtime.tokenizer.decode(response[:room])
    sample.reward = 0.0
    return sample


Told = tuple[list[int], list[int], list[int]]


def _label(sample: Sample, tokenizer: Any) -> Told:
    """Prompt, response and mask where the label is the answer."""
    if not sample.label:
        raise DataError(
            f"{sample.describe()} has no answer to learn: set label_key to the key that holds it"
        )
    answer, end = encode(tokenizer, sample.label), tokenizer.eos_token_id
    answer += [] if end is None else [end]
    return list(sample.tokens), answer, [1] * len(answer)


def _conversation(sample: Sample, tokenizer: Any) -> Told:
    """The same where an assistant speaks in the prompt."""
    assert not isinstance(sample.prompt, str)
    tools = sample.metadata.get("tools")
    tokens, mask = MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(sample.prompt, tools)
    start = len(mask) - response_length(mask)
    end = max((place for place, trained in enumerate(mask) if trained), default=-1) + 1
    if start >= end or not start:
        raise DataError(
            f"{sample.describe()} has nothing to learn: its messages need one of an assistant, "
            "after another one"
        )
    return tokens[:start], tokens[start:end], mask[start:end]
