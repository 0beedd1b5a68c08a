import torch
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample


def check_something_to_learn(args, samples: list[Sample], **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = torch.tensor(rewards, dtype=torch.float).std() > 0.0
    return DynamicFilterOutput(
        keep=bool(keep), reason=None if keep else f"zero_std_{round(rewards[0], 1)}"
    )


def pop_newest(args, rollout_id, buffer: list[list[Sample]], num_samples: int):
    num_to_pop = min(len(buffer), num_samples)
    samples = buffer[-num_to_pop:]
    del buffer[-num_to_pop:]
    return samples


def remove_truncated(args, data):
    for group in data:
        for sample in group:
            if sample.status == Sample.Status.TRUNCATED:
                sample.remove_sample = True


def note_length(args, sample: Sample, *, rollout_id, evaluation):
    sample.metadata["noted_length"] = len(sample.response)
    return sample
