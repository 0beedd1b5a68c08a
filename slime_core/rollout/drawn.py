"""Samples as they were drawn, for what answers a prompt once more. Pure."""

from __future__ import annotations

from slime_core.sample import Sample

OF_ANSWERS = (
    "tokens", "response", "response_length", "reward", "loss_mask", "weight_versions", "spans",
    "rollout_id", "rollout_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets",
    "rollout_routed_experts", "teacher_log_probs", "remove_sample", "status",
    "non_generation_time", "spec_info", "prefix_cache_info",
)  # fmt: skip
"""What of a sample is made when it is answered."""


def as_drawn(sample: Sample) -> Sample:
    """A pending copy with the prompt's tokens and all that no answer gave it: media, functions of
    its own and attributes too."""
    drawn = Sample.from_dict({n: v for n, v in sample.to_dict().items() if n not in OF_ANSWERS})
    drawn.tokens = list(sample.tokens[: sample.prompt_length])
    return drawn
