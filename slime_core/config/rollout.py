"""The groups `rollout` and `rewards` of the configuration. docs/rewards-and-tools.md shows them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from slime_core.config.base import Group, Identity, Numeric, Operational
from slime_core.seeds import MOST_SEED

AGENT_GENERATE = "slime_core.agents.generate.generate"


class RolloutGroup(Group):
    """Generation."""

    hf_checkpoint: Identity[str]
    """Folder of the Hugging Face model that training starts from, tokenizer included."""
    megatron_load: Identity[str | None] = None
    """Megatron checkpoint (torch_dist, of Megatron-LM or slime) whose weights take the place of
    those in hf_checkpoint."""
    rollout_batch_size: Numeric[int] = Field(ge=1)
    """Prompts of one iteration."""
    n_samples_per_prompt: Identity[int] = Field(default=1, ge=1)
    """Samples of each prompt: one group."""
    rollout_max_response_len: Numeric[int] = Field(ge=1)
    """Most tokens of a response."""
    rollout_temperature: Numeric[float] = Field(default=1.0, gt=0)
    """Sampling temperature; log-probs divide logits by it."""
    rollout_top_p: Numeric[float] = Field(default=1.0, gt=0, le=1)
    """Nucleus of the sampling."""
    rollout_top_k: Numeric[int] = -1
    """Highest-probability tokens to sample from; -1 takes all."""
    rollout_stop: Numeric[list[str]] = Field(default_factory=list)
    """Strings that end a response."""
    rollout_stop_token_ids: Numeric[list[int]] = Field(default_factory=list)
    """Tokens that end a response, besides the model's end token."""
    rollout_skip_special_tokens: Numeric[bool] = False
    """Leave special tokens out of the response text (never out of the tokens)."""
    rollout_seed: Identity[int] = Field(default=42, ge=0, le=MOST_SEED)
    """Seed of shuffling and sampling."""
    rollout_max_context_len: Numeric[int | None] = Field(default=None, ge=2)
    """Most tokens of prompt and response together, tool output included; only
    rollout_max_response_len counts without it."""
    custom_generate_function_path: Numeric[str | None] = None
    """Import path of `async generate(args, sample, sampling_params)` for each sample, or
    `async generate(args, samples, evaluation=False)` for a group."""
    rollout_sample_hook_path: Numeric[list[str]] = Field(default_factory=list)
    """Import paths of `hook(args, sample, *, rollout_id, evaluation)`, called before grading."""
    rollout_sample_filter_path: Numeric[str | None] = None
    """Import path of `filter(args, groups)`, which sees all groups of a batch and takes samples out
    of the loss by setting their remove_sample."""
    agent_path: Numeric[str | None] = None
    """Import path of `async agent(base_url, api_key, sample)`, which works on each sample through
    an OpenAI-compatible gateway and returns its reward, or None for the configured grader."""
    agent_timeout_s: Operational[float] = Field(default=600.0, gt=0)
    """Deadline of an agent's work on one sample."""
    agent_concurrency: Operational[int] = Field(default=128, ge=1)
    """Agents that work at once; the samples of others wait."""
    max_turns: Numeric[int] = Field(default=5, ge=1)
    """Most turns of a multi-turn generation; of an agent, most answers of the model."""
    tool_paths: Numeric[list[str]] = Field(default_factory=list)
    """Tools of slime_core.rollout.multiturn: `calculator`, `python` (in a sandbox), or import paths
    of your own."""
    tool_parser: Numeric[Literal["auto", "hermes", "glm", "llama", "mistral"]] = "auto"
    """How the model writes tool calls; auto knows each format when it sees it."""
    tool_timeout_s: Operational[float] = Field(default=30.0, gt=0)
    """Deadline of one tool call."""
    custom_config: Numeric[dict[str, Any]] = Field(default_factory=dict)
    """Further settings for custom functions, which read them as args.NAME; or the path of a YAML
    file that holds them."""
    rollout_function_path: Numeric[str | None] = None
    """Import path of `generate_rollout(args, rollout_id, data_source, evaluation=False)`, which
    makes a whole batch in place of our loop."""
    custom_rollout_log_function_path: Operational[str | None] = None
    """Import path of `log(rollout_id, args, samples, rollout_extra_metrics, rollout_time)`, which
    is told of each sealed batch and changes nothing."""
    rollout_all_samples_process_path: Operational[str | None] = None
    """Import path of `process(args, all_samples, data_source)`, which is told of all groups of an
    iteration, those that are not trained too, and changes nothing."""
    buffer_filter_path: Numeric[str | None] = None
    """Which groups that came back are begun first: fifo, prioritized, stratified, diversity,
    quality, or the import path of `filter(args, rollout_id, buffer, num_samples)`."""
    over_sampling_batch_size: Numeric[int | None] = Field(default=None, ge=1)
    """Prompts begun at once, and again where filters left too few; default rollout_batch_size."""
    dynamic_sampling_filter_path: Numeric[str | None] = None
    """Which scored groups are trained: `check_reward_nonzero_std`,
    `check_reward_nonzero_std_with_fallback`, or the import path of `filter(args, samples)`."""
    partial_rollout: Numeric[bool] = False
    """Take the first groups that end; what the others have by then is kept and goes on first in
    the next iteration."""
    mask_offpolicy_in_partial_rollout: Numeric[bool] = False
    """Leave tokens that older weights produced out of the loss."""
    failed_samples: Numeric[Literal["mask", "drop", "train"]] = "mask"
    """Samples that their generate function marked FAILED: leave them out of the loss, drop their
    group, or train them."""
    sglang_server_concurrency: Operational[int] = Field(default=512, ge=1)
    """Requests in flight per engine."""

    @property
    def generate_path(self) -> str | None:
        """Import path of what answers prompts in place of plain generation."""
        return self.custom_generate_function_path or (AGENT_GENERATE if self.agent_path else None)


class RewardsGroup(Group):
    """Scoring."""

    rm_type: Numeric[str | None] = None
    """Built-in grader, such as exact_match or math."""
    custom_rm_path: Numeric[str | None] = None
    """Import path of `async reward(args, sample, **kwargs) -> float`."""
    reward_key: Numeric[str | None] = None
    """Which entry of a dict reward is trained."""
    group_rm: Numeric[bool] = False
    """Hand whole groups to custom_rm_path, as `async fn(args, samples) -> list`."""
    rm_url: Numeric[str | None] = None
    """Reward server of rm_type remote_rm."""
    custom_reward_post_process_path: Numeric[str | None] = None
    """Import path of `process(args, samples) -> (raw_rewards, rewards)`, over all samples of a
    batch, in place of shaping and the group's mean and deviation."""
    custom_convert_samples_to_train_data_path: Numeric[str | None] = None
    """Import path of `convert(args, samples) -> dict` of per-sample lists, over all samples of a
    batch, in place of the built-in conversion."""
    reward_error_policy: Numeric[Literal["mask", "zero", "drop", "fail"]] = "mask"
    """A sample that cannot be graded: leave it out, reward 0, drop its group, or stop the run."""
    reward_timeout_s: Operational[float] = Field(default=60.0, gt=0)
    """Deadline of one grading."""
    reward_workers: Operational[int] = Field(default=1, ge=1)
    """Processes that run graders."""
    reward_shaping: Numeric[Literal["none", "overlong", "cosine"]] = "none"
    """Rewards by length: overlong subtracts up to overlong_penalty_factor near the limit (DAPO),
    cosine prefers short right answers and long wrong ones."""
    overlong_buffer_len: Numeric[int | None] = Field(default=None, ge=1)
    """Tokens before rollout_max_response_len over which the penalty grows (overlong)."""
    overlong_penalty_factor: Numeric[float] = Field(default=1.0, ge=0)
    """Size of the full penalty (overlong)."""
    grader_secrets: Operational[str | None] = None
    """block:NAME of a GraderSecrets block; graders find its entries in their environment."""
