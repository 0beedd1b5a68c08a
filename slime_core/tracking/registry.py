"""Every metric: its name, its unit and what it means.

A part in braces stands for anything (a dataset, a reason); names follow slime's where slime has
the same number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Metric:
    """One entry of the registry; `name` may hold parts in braces."""

    name: str
    unit: str
    meaning: str


METRICS = (
    Metric("progress/iteration", "iterations", "the iteration this record belongs to"),
    Metric("progress/weight_version", "iterations", "iterations contained in the served weights"),
    Metric("rollout/raw_reward", "reward", "mean reward of the batch before normalisation"),
    Metric("rollout/rewards", "reward", "mean reward after the estimator's group transform"),
    Metric("rollout/raw_reward/std", "reward", "spread of the reward before normalisation"),
    Metric("rollout/response_len/{statistic}", "tokens", "length of the trained responses"),
    Metric("rollout/total_lengths/{statistic}", "tokens", "length of prompt and response"),
    Metric("rollout/truncated_ratio", "share", "responses that ran into the length limit"),
    Metric("rollout/repetition_frac", "share", "responses that repeat themselves"),
    Metric("rollout/zero_std/count_{reward}", "groups", "groups whose rewards are all this value"),
    Metric("rollout/dynamic_filter/drop_{reason}", "groups", "groups a filter dropped, by reason"),
    Metric("rollout/dynamic_filter/spare_{reason}", "groups", "the same, kept to fill a batch"),
    Metric("rollout/reward/{entry}", "reward", "mean of one entry of dict rewards"),
    Metric("rollout/reward_error/{reason}", "samples", "samples that could not be graded"),
    Metric("rollout/round_number", "turns", "turns of a multi-turn rollout"),
    Metric("rollout/correct_length/{percentile}", "tokens", "responses of reward 1, percentiles"),
    Metric(
        "rollout/correct_entropy", "nats", "mean entropy of the tokens of responses of reward 1"
    ),
    Metric("multi_turn/multi_turn_metric/round_number_{statistic}", "turns", "turns of a rollout"),
    Metric("multi_turn/raw_response_length/{statistic}", "tokens", "responses, all turns"),
    Metric("multi_turn/wo_obs_response_length/{statistic}", "tokens", "the same, trained tokens"),
    Metric("passrate/pass@{k}", "share", "chance that k of a group's rollouts hold a reward of 1"),
    Metric("rollout/reward_shaping", "reward", "what shaping by length added to the mean reward"),
    Metric("rollout/log_probs", "nats", "mean log-prob of the trained tokens under the trainer"),
    Metric("rollout/rollout_log_probs", "nats", "the same as the engine reported it"),
    Metric("rollout/ref_log_probs", "nats", "the same under the reference"),
    Metric("rollout/teacher_log_probs", "nats", "the same under the teacher"),
    Metric("rollout/opd_reverse_kl", "nats", "mean of old minus teacher's log-prob"),
    Metric("rollout/kl", "nats", "divergence from the reference that shaped token rewards"),
    Metric("rollout/advantages", "reward", "mean advantage of the trained tokens"),
    Metric("rollout/values", "reward", "mean value before the iteration, by the critic"),
    Metric("rollout/returns", "reward", "mean return that the critic learns"),
    Metric("rollout/entropy", "nats", "mean entropy of the next-token distribution"),
    Metric("rollout/spec_accept_rate", "share", "draft tokens that were accepted"),
    Metric("rollout/spec_accept_length", "tokens", "tokens completed by one verification"),
    Metric("rollout/prefix_cache_hit_rate", "share", "prompt tokens found in the prefix cache"),
    Metric("rollout/avg_cached_tokens_per_sample", "tokens", "cached prompt tokens of a sample"),
    Metric("rollout/groups/{count}", "groups", "groups by what became of them"),
    Metric("rollout/samples/{count}", "samples", "samples by what became of them"),
    Metric("rollout/response_tokens", "tokens", "response tokens of the batch"),
    Metric("rollout/trained_tokens", "tokens", "those of them that enter the loss"),
    Metric("rollout/zero_std_groups", "groups", "groups whose rewards are all equal"),
    Metric("train/loss", "loss", "total loss, mean over the iteration's optimizer steps"),
    Metric("train/pg_loss", "loss", "policy loss"),
    Metric("train/entropy_loss", "nats", "entropy that the bonus weighs"),
    Metric("train/pg_clipfrac", "share", "tokens whose ratio was clipped"),
    Metric("train/ppo_kl", "nats", "mean of old minus current log-prob"),
    Metric("train/kl_loss", "nats", "divergence from the reference model"),
    Metric("train/train_rollout_logprob_abs_diff", "nats", "trainer against engine, per token"),
    Metric(
        "train/train_rollout_logprob_abs_diff_max", "nats", "the same, the token furthest apart"
    ),
    Metric("train/ois", "ratio", "trainer by engine probability, before any bound"),
    Metric("train/tis", "ratio", "the weight that the loss was multiplied by"),
    Metric("train/tis_clipfrac", "share", "tokens whose weight was bounded"),
    Metric("train/tis_abs", "ratio", "distance of the unbounded weight from 1"),
    Metric("train/tis_scale", "ratio", "what made the mean weight of an optimizer step 1"),
    Metric("train/rs_rejected", "share", "tokens left out because their ratio was out of bounds"),
    Metric("train/kl_coef", "weight", "coefficient of the KL in the iteration"),
    Metric("train/opsm_clipfrac", "share", "tokens of sequences that OPSM left out"),
    Metric("train/mis_kl", "nats", "KL of the engine from the trainer, k1"),
    Metric("train/mis_k3_kl", "nats", "the same, k3"),
    Metric("train/mis_chi2_token", "squared ratio", "chi-square distance by token"),
    Metric("train/mis_chi2_seq", "squared ratio", "chi-square distance by sequence"),
    Metric("train/mis_train_ppl", "perplexity", "of the responses under the trainer"),
    Metric("train/mis_rollout_ppl", "perplexity", "of the responses under the engine"),
    Metric("train/mis_ppl_ratio", "ratio", "the former by the latter, sequence by sequence"),
    Metric("train/value_loss", "squared reward", "loss of the critic"),
    Metric("train/value_clipfrac", "share", "tokens whose value was kept near the old one"),
    Metric("train/critic_grad_norm", "norm", "the critic's gradient norm before clipping"),
    Metric("train/critic_lr", "rate", "learning rate of the critic"),
    Metric("train/overlong_truncated_rows", "samples", "cut to fit a micro-batch"),
    Metric("train/overlong_truncated_tokens", "tokens", "cut off from them"),
    Metric("train/overlong_dropped_rows", "samples", "left untrained since they did not fit"),
    Metric(
        "train/postprocess_masked_tokens",
        "tokens",
        "taken out of an optimizer step by rollout_data_postprocess_path",
    ),
    Metric(
        "train/postprocess_changed_{column}", "tokens", "response tokens whose column it changed"
    ),
    Metric("train/tokens", "tokens", "trained tokens of an optimizer step"),
    Metric("train/micro_batches", "micro-batches", "of an optimizer step on a rank, all roles"),
    Metric("train/grad_norm", "norm", "gradient norm before clipping"),
    Metric("train/lr", "rate", "learning rate of the iteration's last step"),
    Metric("train/steps", "steps", "optimizer steps of the iteration"),
    Metric("train/skipped_steps", "steps", "steps left out because of NaN or Inf"),
    Metric("train/{name}", "as the loss reports", "a further number of the loss"),
    Metric("sync/canary_abs_diff", "nats", "trainer against engine on the canary tokens"),
    Metric("sync/engines", "engines", "engines that serve the new weights"),
    Metric("perf/{stage}_time", "s", "seconds of a stage of the iteration"),
    Metric("perf/rollout_time", "s", "seconds of generation, rewards and the abort included"),
    Metric("perf/update_weights_time", "s", "seconds of the weight sync"),
    Metric("perf/log_probs_time", "s", "seconds of the pass for the old log-probs"),
    Metric("perf/actor_train_time", "s", "seconds of the optimizer steps"),
    Metric("perf/step_time", "s", "seconds of all stages together"),
    Metric("perf/wait_time_ratio", "share", "part of the iteration in which the trainer waits"),
    Metric("perf/tokens_per_gpu_per_sec", "tokens/s", "response tokens by generation time and GPU"),
    Metric("perf/effective_tokens_per_gpu_per_sec", "tokens/s", "the same, trained tokens only"),
    Metric("perf/longest_sample_tokens_per_sec", "tokens/s", "longest response by generation time"),
    Metric("perf/non_generation_time/{statistic}", "s", "seconds of a sample outside the engine"),
    Metric("perf/{name}", "as the stage reports", "a further timing of a stage"),
    Metric("eval/{dataset}/missed", "flag", "1 where the evaluation failed and gave no result"),
    Metric("eval/{dataset}/reward", "reward", "mean reward on held-out prompts"),
    Metric(
        "eval/{dataset}/pass@{k}", "share", "chance that k answers to a prompt hold a reward of 1"
    ),
    Metric("eval/{dataset}/response_len/{statistic}", "tokens", "length of the answers"),
    Metric("eval/{dataset}/truncated_ratio", "share", "answers that ran into the length limit"),
    Metric("eval/{dataset}/samples", "samples", "answers that were graded"),
    Metric("eval/{dataset}/{name}", "as the evaluation reports", "a number of the evaluation"),
    Metric("eval/{dataset}", "reward", "mean reward on held-out prompts"),
)


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    whole_names_first = sorted(METRICS, key=lambda metric: "{" in metric.name)
    return tuple((re.compile(_as_pattern(metric.name)), metric) for metric in whole_names_first)


def _as_pattern(name: str) -> str:
    parts = re.split(r"(\{\w+\})", name)
    return "".join(
        r"[^/]+(?:/[^/]+)*?" if part.startswith("{") else re.escape(part) for part in parts
    )


def find(name: str) -> Metric | None:
    """The registry's entry for a metric; None for a name that nobody explained."""
    for pattern, metric in _patterns():
        if pattern.fullmatch(name):
            return metric
    return None


def sanitised(name: str) -> str:
    """A name that every tracker takes: letters, digits, `_ - . /`, no empty or dotted parts."""
    parts = (re.sub(r"[^\w.\-]", "_", part, flags=re.ASCII) for part in name.split("/"))
    kept = [part for part in parts if part.strip(".")]
    return "/".join(kept) or "unnamed"
