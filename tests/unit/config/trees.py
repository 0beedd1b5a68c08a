"""A small configuration that passes every rule."""

from __future__ import annotations

import copy
from typing import Any

from slime_core.config.loading import load_config
from slime_core.config.tree import RunConfig

SMALL: dict[str, Any] = {
    "run": {"num_rollout": 2},
    "data": {"prompt_data": "p.jsonl", "label_key": "label"},
    "rollout": {
        "hf_checkpoint": "m",
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 8,
    },
    "rewards": {"rm_type": "exact_match"},
}


def small(**overrides: Any) -> RunConfig:
    return load_config(copy.deepcopy(SMALL), overrides)
