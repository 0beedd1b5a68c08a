"""Supervised training: the answer comes from the data, no engine generates anything.

    slime train ... --loss-type sft_loss \\
        --custom-generate-function-path slime_core.rollout.sft.generate

The answer to a prompt is its label (label_key). Evaluations generate as ever.
"""

from __future__ import annotations

from typing import Any

from slime_core.data.render import encode
from slime_core.errors import DataError
from slime_core.rollout import slime_names
from slime_core.rollout.runtime import current
from slime_core.sample import Sample, Status


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Appends the label and the end token as a response that is trained; reward 0.

    An answer longer than rollout_max_response_len is cut and counts as truncated.

    Raises:
        DataError: the row has no label.
    """
    if evaluation:
        return await slime_names.generate(args, sample, sampling_params)
    runtime = current()
    if not sample.label:
        raise DataError(
            f"{sample.describe()} has no answer to learn: set label_key to the key that holds it"
        )
    answer = encode(runtime.tokenizer, sample.label)
    end = runtime.tokenizer.eos_token_id
    answer += [] if end is None else [end]
    room = runtime.sampling.left(sample)
    sample.status = Status.COMPLETED if len(answer) <= room else Status.TRUNCATED
    answer = answer[:room]
    sample.tokens = [*sample.tokens, *answer]
    sample.response, sample.response_length = sample.label, len(answer)
    sample.loss_mask = [1] * len(answer)
    sample.reward = 0.0
    return sample
