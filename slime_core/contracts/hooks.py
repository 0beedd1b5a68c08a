"""Every kind of function that `slime contract` knows, by the setting that names it."""

from __future__ import annotations

from dataclasses import dataclass

from slime_core.errors import ConfigError
from slime_core.near import nearest


@dataclass(frozen=True)
class Hook:
    """A kind of function.

    Attributes:
        name: the setting that names such a function.
        call: how it is written.
        about: when it is called.
    """

    name: str
    call: str
    about: str


HOOKS = (
    Hook("custom_rm_path", "async def reward(args, sample, **kwargs) -> float | dict",
         "for each finished sample"),
    Hook("group_rm", "async def batched_custom_rm(args, samples) -> list",
         "for each finished group (custom_rm_path with group_rm)"),
    Hook("custom_generate_function_path",
         "async def generate(args, sample, sampling_params[, evaluation]) -> Sample | list",
         "for each sample, or as generate(args, samples, evaluation=False) for each group"),
    Hook("agent_path", "[async] def agent(base_url, api_key, sample) -> float | dict | None",
         "for each sample, with a session of OpenAI's protocol"),
    Hook("rollout_sample_hook_path", "def hook(args, sample, *, rollout_id, evaluation)",
         "for each sample before it is graded"),
    Hook("dynamic_sampling_filter_path", "def filter(args, samples) -> bool | DynamicFilterOutput",
         "for each graded group"),
    Hook("buffer_filter_path", "def filter(args, rollout_id, buffer, num_samples) -> list",
         "when groups came back, to choose among them"),
    Hook("rollout_sample_filter_path", "def filter(args, groups)",
         "with all groups of a batch, to set remove_sample"),
    Hook("custom_reward_post_process_path", "def process(args, samples) -> (raw, rewards)",
         "with all samples of a batch"),
    Hook("custom_convert_samples_to_train_data_path",
         "def convert(args, samples) -> dict of tokens, response_lengths, rewards, loss_masks, ...",
         "with all samples of a batch, in place of the built-in conversion"),
    Hook("data_source_path", "class Source: __init__(args) or (dataset, args); get_samples(n)",
         "when prompts are drawn"),
    Hook("rollout_function_path",
         "def generate_rollout(args, rollout_id, data_source, evaluation=False)",
         "in place of the whole rollout of an iteration"),
    Hook("custom_rollout_log_function_path",
         "def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time)",
         "with the samples of each sealed batch"),
    Hook("rollout_all_samples_process_path", "def process(args, all_samples, data_source)",
         "with all groups of an iteration, those that are not trained too"),
    Hook("custom_eval_rollout_log_function_path",
         "def log(rollout_id, args, data, extra_metrics)",
         "with each dataset's evaluation"),
    Hook("custom_update_weight_post_write_path",
         "[async] def hook(args, version_dir, rollout_engines)",
         "with the folder of each version of the weights, before engines load it"),
    Hook("tool_paths", "def tool(name: type, ...) -> str", "when the model calls it"),
    Hook("custom_loss_function_path", "def loss(args, batch, logits, sum_of_sample_mean)",
         "in the trainer, for each micro-batch"),
    Hook("custom_advantage_function_path", "def advantages(args, rollout_data)",
         "in the trainer, once an iteration"),
    Hook("custom_tis_function_path", "def tis(args, *, pg_loss, train_log_probs, ...)",
         "in the trainer, for each micro-batch"),
    Hook("custom_pg_loss_reducer_function_path",
         "def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)",
         "in the trainer, for each micro-batch"),
    Hook("rollout_data_postprocess_path", "def postprocess(args, rollout_id, rollout_data)",
         "on each rank with the whole batch, before the first optimizer step"),
    Hook("custom_megatron_init_path", "def init(args)",
         "on each rank when they have met, before there is a model"),
    Hook("custom_megatron_before_log_prob_hook_path", "def hook(args, model, store_prefix)",
         "on each rank before log-probs of a batch are read"),
    Hook("custom_megatron_before_train_step_hook_path",
         "def hook(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)",
         "on each rank before the gradients of a step"),
)  # fmt: skip
SHORT = {
    "reward": "custom_rm_path",
    "rm": "custom_rm_path",
    "group_reward": "group_rm",
    "generate": "custom_generate_function_path",
    "filter": "dynamic_sampling_filter_path",
    "buffer": "buffer_filter_path",
    "convert": "custom_convert_samples_to_train_data_path",
    "source": "data_source_path",
    "rollout": "rollout_function_path",
    "eval_function_path": "rollout_function_path",
    "tool": "tool_paths",
    "postprocess": "rollout_data_postprocess_path",
    "hook": "rollout_sample_hook_path",
}


def hook_named(given: str) -> Hook:
    """The kind of a name: a setting, its flag, or a short word for it.

    Raises:
        ConfigError: there is none.
    """
    name = given.removeprefix("--").replace("-", "_")
    known = {hook.name: hook for hook in HOOKS}
    for candidate in (name, SHORT.get(name, ""), f"{name}_path", f"custom_{name}_path",
                      f"custom_{name}_function_path"):  # fmt: skip
        if candidate in known:
            return known[candidate]
    close = nearest(name, [*known, *SHORT])
    hint = f"did you mean {close}?" if close else "`slime contract` lists them"
    raise ConfigError(f"there is no hook {given}: {hint}")
