import torch
from slime.utils.types import Sample


def convert_samples(args, samples: list[Sample]):
    """Drops truncated samples and centres rewards over the rest of the batch."""
    samples = [s for s in samples if s.status != Sample.Status.TRUNCATED]
    raw = [s.get_reward_value(args) for s in samples]
    rewards = torch.tensor(raw, dtype=torch.float)
    rewards = (rewards - rewards.mean()).tolist()
    train_data = {
        "tokens": [s.tokens for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": rewards,
        "raw_reward": raw,
        "truncated": [0] * len(samples),
        "sample_indices": [s.index for s in samples],
    }
    loss_masks = []
    for s in samples:
        if s.loss_mask is None:
            s.loss_mask = [1] * s.response_length
        loss_masks.append(s.loss_mask)
    train_data["loss_masks"] = loss_masks
    if samples[0].rollout_log_probs is not None:
        train_data["rollout_log_probs"] = [s.rollout_log_probs for s in samples]
    return train_data
