from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_verl
from slime.utils.types import Sample


async def reward_func(args, sample: Sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    response = sample.response or ""
    if extract_answer(response) is not None:
        return 1.0 if grade_answer_verl(response, sample.label) else 0.0
    hits = sum(given == right for given, right in zip(response, sample.label, strict=False))
    return 0.1 * hits


async def batched_custom_rm(args, samples: list[Sample], **kwargs) -> list[float]:
    longest = max(sample.response_length for sample in samples) or 1
    return [sample.response_length / longest for sample in samples]


def reward_post_process(args, samples):
    raw = [sample.get_reward_value(args) for sample in samples]
    n = args.n_samples_per_prompt
    rewards = []
    for start in range(0, len(raw), n):
        group = raw[start : start + n]
        mean = sum(group) / len(group)
        rewards += [reward - mean for reward in group]
    return raw, rewards
