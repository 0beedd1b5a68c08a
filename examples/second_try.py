"""Several turns: whoever answers wrong is asked again, and a late answer is worth less.

    slime train examples/second-try.yaml

What is put between the turns is part of the sequence and stays out of the loss. `Turns` keeps the
tokens, log-probs and masks; nothing is tokenised twice.
"""

from __future__ import annotations

from typing import Any

from slime_core.rollout.runtime import current
from slime_core.rollout.turns import Turns


async def generate(
    args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False
) -> Any:
    """Asks up to `max_turns` times; an evaluation asks once."""
    turns = Turns(current(), sample)
    answer = await turns.answer(sampling_params)
    limit = 1 if evaluation else args.max_turns
    while answer != sample.label and turns.count < limit and not turns.over:
        turns.put(sample.prompt)
        if turns.over:
            break
        answer = await turns.answer(sampling_params)
    sample.response = answer
    sample.metadata = {**sample.metadata, "round_number": turns.count}
    return sample


async def reward_func(args: Any, sample: Any, **kwargs: Any) -> float:
    """1.0 for a right answer at once, half of it at the second try, and so on."""
    right = sample.response == sample.label
    return 0.5 ** (sample.metadata["round_number"] - 1) if right else 0.0
