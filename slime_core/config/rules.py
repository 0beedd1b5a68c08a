"""Rules over several fields. Each states the problem with its numbers, and the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_core.config import algorithm_rules, data_rules, parallel, rollout_rules
from slime_core.seeds import MOST_SEED

if TYPE_CHECKING:
    from slime_core.config.tree import RunConfig


def validate(config: RunConfig) -> None:
    """Runs every rule; raises ValueError with one full sentence for each that is broken."""
    rules = (
        _batch_identity,
        _dynamic_batching,
        algorithm_rules.validate,
        _eval,
        _save_hf,
        _post_write,
        _dumps,
        _only,
        data_rules.validate,
        rollout_rules.validate,
        parallel.layout_problem,
        _engines,
        _engine_size,
        _engine_seed,
        _named_options,
    )
    problems = [problem for rule in rules if (problem := rule(config))]
    if problems:
        raise ValueError("\n".join(problems))


def _batch_identity(config: RunConfig) -> str | None:
    prompts, n = config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    batch, steps = config.train.global_batch_size, config.train.num_steps_per_rollout
    samples = prompts * n
    if batch is not None and steps is not None and batch * steps != samples:
        return (
            f"rollout_batch_size {prompts} x n_samples_per_prompt {n} = {samples} samples, but "
            f"global_batch_size {batch} x num_steps_per_rollout {steps} = {batch * steps}: every "
            "sample is trained exactly once, so make them equal"
        )
    divisor, name = (batch, "global_batch_size") if steps is None else (steps, "steps")
    if divisor is not None and samples % divisor:
        name = "global_batch_size" if name == "global_batch_size" else "num_steps_per_rollout"
        return (
            f"{samples} samples an iteration ({prompts} prompts x {n}) cannot be divided by "
            f"{name} {divisor}: choose a divisor of {samples}"
        )
    per_step = samples // config.num_steps
    if per_step % n:
        return (
            f"an optimizer step of {per_step} samples would split a group of {n}: make "
            f"global_batch_size a multiple of n_samples_per_prompt"
        )
    return None


def _dynamic_batching(config: RunConfig) -> str | None:
    if config.train.use_dynamic_batch_size and config.train.max_tokens_per_gpu is None:
        return "use_dynamic_batch_size needs max_tokens_per_gpu: the most tokens of a micro-batch"
    if config.train.max_tokens_per_gpu is not None and not config.train.use_dynamic_batch_size:
        return "max_tokens_per_gpu has an effect only with use_dynamic_batch_size: set both"
    if config.train.overlong_policy != "error" and config.train.max_tokens_per_gpu is None:
        return (
            f"overlong_policy {config.train.overlong_policy} needs a limit: set max_tokens_per_gpu "
            "and use_dynamic_batch_size"
        )
    return None


def _eval(config: RunConfig) -> str | None:
    pairs = config.eval.eval_prompt_data
    if len(pairs) % 2:
        return f"eval_prompt_data takes pairs of name and file, but has {len(pairs)} entries"
    has_data = bool(pairs) or config.eval.eval_config is not None
    if config.eval.eval_interval is not None and not has_data:
        return "eval_interval needs held-out prompts: set eval_prompt_data or eval_config"
    if has_data and config.eval.eval_interval is None:
        return "evaluation data is given without eval_interval: set it, or remove the data"
    return None


def _dumps(config: RunConfig) -> str | None:
    saved, loaded = config.debug.save_debug_rollout_data, config.debug.load_debug_rollout_data
    if saved is not None and "{rollout_id}" not in saved:
        return (
            f"save_debug_rollout_data {saved} would be written over in each iteration: put "
            "{rollout_id} into it"
        )
    if loaded is None:
        return None
    if loaded == saved:
        return "save_debug_rollout_data and load_debug_rollout_data name the same files"
    if config.rollout.rollout_function_path is not None:
        return (
            "load_debug_rollout_data and rollout_function_path both say where samples come from: "
            "leave one out"
        )
    return None


def _only(config: RunConfig) -> str | None:
    """Runs that leave out the trainer or the engines."""
    debug = config.debug
    if debug.debug_rollout_only and debug.debug_train_only:
        return "debug_rollout_only and debug_train_only together leave nothing to do"
    if debug.debug_rollout_only and debug.load_debug_rollout_data is not None:
        return "debug_rollout_only generates samples: leave load_debug_rollout_data out"
    if debug.debug_rollout_only and config.rollout.megatron_load is not None:
        return (
            "debug_rollout_only generates with the weights of hf_checkpoint: leave megatron_load "
            "out, or put its weights into a Hugging Face folder"
        )
    if debug.debug_rollout_only and config.tracking.mlflow_log_final_weights:
        return "debug_rollout_only trains no weights: leave mlflow_log_final_weights out"
    if config.cluster.offload_train and (debug.debug_rollout_only or debug.debug_train_only):
        left_out = "debug_rollout_only" if debug.debug_rollout_only else "debug_train_only"
        return (
            f"offload_train makes a trainer and engines take turns, and {left_out} starts one of "
            "them only: leave offload_train out"
        )
    given = debug.load_debug_rollout_data is not None or config.algorithm.loss_type == "sft_loss"
    if debug.debug_train_only and not given:
        return (
            "debug_train_only starts no engine, so it needs samples: set load_debug_rollout_data "
            "(files of --save-debug-rollout-data), or train from labels with loss_type sft_loss"
        )
    return None


def _save_hf(config: RunConfig) -> str | None:
    template = config.train.save_hf
    if template is None:
        return None
    try:
        folders = {template.format(rollout_id=k) for k in (0, 1)}
    except (KeyError, IndexError, ValueError, AttributeError, TypeError):
        folders = set()
    if "" in folders or not folders:
        return (
            f"save_hf {template!r} is no folder: `{{rollout_id}}` is the only thing in braces that "
            "it may hold, as in weights/{rollout_id}"
        )
    return None


def _post_write(config: RunConfig) -> str | None:
    sync = config.sync
    if sync.custom_update_weight_post_write_path is None:
        return None
    if config.debug.debug_rollout_only or config.debug.debug_train_only:
        return (
            "custom_update_weight_post_write_path would never be called: debug_rollout_only and "
            "debug_train_only write no weights for engines; leave it out"
        )
    if sync.update_weight_transport == "disk":
        return None
    return (
        "custom_update_weight_post_write_path is told of folders, which update_weight_transport "
        f"{sync.update_weight_transport} does not write: use disk"
    )


def _engines(config: RunConfig) -> str | None:
    if config.cluster.rollout_num_gpus_per_engine != 1:
        return "engines over several GPUs are not there yet: set rollout_num_gpus_per_engine to 1"
    return None


def _engine_size(config: RunConfig) -> str | None:
    """SGLang spreads an engine over tensor x pipeline ranks, one GPU each."""
    options, gpus = config.sglang, config.cluster.rollout_num_gpus_per_engine
    tensor = options.get("tp_size", options.get("tensor_parallel_size"))
    pipeline = options.get("pp_size", options.get("pipeline_parallel_size", 1))
    if not isinstance(tensor, int) or not isinstance(pipeline, int) or tensor * pipeline == gpus:
        return None
    return (
        f"--sglang-tp-size {tensor} x --sglang-pp-size {pipeline} needs {tensor * pipeline} GPUs, "
        f"but rollout_num_gpus_per_engine is {gpus}: make them equal, or leave tp-size out"
    )


def _engine_seed(config: RunConfig) -> str | None:
    seed = config.sglang.get("random_seed")
    if not isinstance(seed, int) or 0 <= seed <= MOST_SEED:
        return None
    return f"--sglang-random-seed {seed}: a seed is from 0 to {MOST_SEED}"


def _named_options(config: RunConfig) -> str | None:
    """Options of Megatron's that are refused, or not there yet, also where YAML holds them."""
    from slime_core.config.known_flags import why_not  # reads the tree, which imports this module

    names = [parallel.option_name(name) for name in config.megatron]
    return "\n".join(reason for name in names if (reason := why_not(name, name))) or None
