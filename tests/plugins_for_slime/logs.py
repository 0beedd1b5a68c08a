"""Functions that only look, as slime's users write them."""

import statistics


def log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    lengths = [sample.response_length for sample in samples]
    metrics = {**(rollout_extra_metrics or {}), "my/length": statistics.mean(lengths)}
    print(f"rollout {rollout_id}: {metrics} in {rollout_time:.1f} s")
    return True


def process_all(args, all_samples, data_source):
    rewards = [sample.get_reward_value(args) for group in all_samples for sample in group]
    print(f"{len(rewards)} samples, best {max(rewards)}")


def log_eval(rollout_id, args, data, extra_metrics):
    for name, found in data.items():
        cut = sum(found["truncated"]) / len(found["truncated"])
        print(f"{name} at {rollout_id}: {statistics.mean(found['rewards'])}, {cut} cut")
    return False
