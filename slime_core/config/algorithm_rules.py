"""Rules over the group `algorithm`: what needs what, and what would have no effect.

An option that cannot change anything is refused: whoever set it expects that it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime_core.algorithms.advantages.registry import Estimator, get_estimator

if TYPE_CHECKING:
    from slime_core.config.algorithm import AlgorithmGroup
    from slime_core.config.tree import RunConfig

_STD_ESTIMATORS = ("grpo", "gspo", "cispo", "sapo", "gmpo", "ipo", "pass_at_k")
_CLIPS = ("ppo", "gspo", "cispo", "gmpo")
_SHAPED = ("discounted", "kl_shaped", "gae")


def _uses_reference(a: AlgorithmGroup) -> bool:
    return a.use_kl_loss or a.kl_coef > 0


def _is(*names: str) -> Callable[[AlgorithmGroup], bool]:
    return lambda a: a.advantage_estimator in names


def _loss_is(*types: str) -> Callable[[AlgorithmGroup], bool]:
    return lambda a: a.loss_type in types


def _custom_with_advantages(a: AlgorithmGroup) -> bool:
    return a.loss_type == "custom_loss" and not a.disable_compute_advantages_and_returns


# Fields that change something only where the condition holds, and the condition in words.
_NEEDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("kl_loss_coef", "use_unbiased_kl"), lambda a: a.use_kl_loss, "with use_kl_loss"),
    (
        ("kl_loss_type", "ref_update_interval"),
        _uses_reference,
        "with use_kl_loss or kl_coef",
    ),
    (
        ("tis_clip", "tis_clip_low", "tis_level", "tis_mode", "tis_batch_normalize"),
        lambda a: a.use_tis and a.custom_tis_function_path is None,
        "with use_tis and without custom_tis_function_path",
    ),
    (
        ("use_routing_replay",),
        _loss_is("policy_loss", "custom_loss"),
        "without loss_type sft_loss, which has no earlier pass",
    ),
    (
        ("use_rollout_routing_replay",),
        _loss_is("policy_loss", "custom_loss"),
        "without loss_type sft_loss, which uses no engine",
    ),
    (("custom_tis_function_path",), lambda a: a.use_tis, "with use_tis"),
    (
        ("use_rs", "rs_veto_threshold"),
        lambda a: a.custom_tis_function_path is None,
        "without custom_tis_function_path, which decides alone",
    ),
    (("custom_loss_function_path",), _loss_is("custom_loss"), "with loss_type custom_loss"),
    (
        ("disable_compute_advantages_and_returns",),
        _loss_is("sft_loss", "custom_loss"),
        "with loss_type sft_loss or custom_loss",
    ),
    (
        (
            *("eps_clip", "eps_clip_high", "eps_clip_c", "use_tis", "use_rs", "rs_veto_threshold"),
            *("use_opsm", "get_mismatch_metrics", "custom_pg_loss_reducer_function_path"),
        ),
        _loss_is("policy_loss"),
        "with loss_type policy_loss",
    ),
    (
        ("entropy_coef", "kl_loss_coef"),
        _loss_is("policy_loss", "sft_loss"),
        "without loss_type custom_loss, which is the whole loss",
    ),
    (
        (
            *("normalize_advantages", "use_opd", "custom_advantage_function_path"),
            *("use_rollout_logprobs", "kl_coef", "keep_old_actor"),
        ),
        lambda a: a.loss_type == "policy_loss" or _custom_with_advantages(a),
        "where the loss looks at advantages",
    ),
    (
        ("rs_level", "rs_estimator", "rs_upper_bound", "rs_lower_bound"),
        lambda a: a.use_rs,
        "with use_rs",
    ),
    (("kl_target",), lambda a: a.kl_coef + a.kl_loss_coef > 0, "with kl_coef or kl_loss_coef"),
    (("old_actor_update_interval",), lambda a: a.keep_old_actor, "with keep_old_actor"),
    (("kl_horizon",), lambda a: a.kl_target is not None, "with kl_target"),
    (("opd_kl_coef", "opd_teacher_load"), lambda a: a.use_opd, "with use_opd"),
    (("opsm_delta",), lambda a: a.use_opsm, "with use_opsm"),
    (
        ("gamma",),
        _is("reinforce_plus_plus", "ppo"),
        "with advantage_estimator reinforce_plus_plus or ppo",
    ),
    (
        ("lambd", "value_clip", "critic_lr", "num_critic_only_steps"),
        _is("ppo"),
        "with advantage_estimator ppo",
    ),
    (("sapo_tau_pos", "sapo_tau_neg"), _is("sapo"), "with advantage_estimator sapo"),
    (("ipo_threshold", "ipo_kl_tau"), _is("ipo"), "with advantage_estimator ipo"),
    (
        ("eps_clip", "eps_clip_high"),
        lambda a: get_estimator(a.advantage_estimator).loss in _CLIPS,
        "where the loss clips a ratio, not with sapo, ipo and gpg",
    ),
    (("rs_lower_bound",), lambda a: a.rs_estimator == "k1", "with rs_estimator k1"),
    (
        ("eps_clip_c",),
        lambda a: get_estimator(a.advantage_estimator).loss in ("ppo", "gspo"),
        "where the loss clips as PPO does, not with cispo, sapo, gmpo, ipo and gpg",
    ),
    (
        ("disable_grpo_std_normalization",),
        _is(*_STD_ESTIMATORS),
        f"with an advantage_estimator that divides by the group's std: "
        f"{', '.join(_STD_ESTIMATORS)}",
    ),
    (
        ("disable_rewards_normalization",),
        lambda a: a.advantage_estimator not in ("ppo", "reinforce_plus_plus", "remax"),
        "where rewards are normalised in groups, which ppo, reinforce_plus_plus and remax do not",
    ),
)


def validate(config: RunConfig) -> str | None:
    """Every problem of the group, a sentence with its fix a line."""
    a = config.algorithm
    estimator = get_estimator(a.advantage_estimator)
    rules = (_estimator, _loss_type, _clip, _kl, _engine_log_probs, _on_policy)
    problems = [problem for rule in rules if (problem := rule(config, a, estimator))]
    return "\n".join([*problems, *_without_effect(a)]) or None


def _without_effect(a: AlgorithmGroup) -> list[str]:
    """Fields that were set and can change nothing."""
    fields = type(a).model_fields
    return [
        f"{name} {getattr(a, name)} has an effect only {words}: "
        + ("leave it out" if words.startswith("without") else "set both, or leave it out")
        for names, condition, words in _NEEDS
        if not condition(a)
        for name in names
        if getattr(a, name) != fields[name].default
    ]


def _estimator(config: RunConfig, a: AlgorithmGroup, estimator: Estimator) -> str | None:
    if estimator.name == "remax" and config.rewards.reward_shaping != "none":
        return (
            "advantage_estimator remax compares with the reward of the greedy answer, which "
            f"reward_shaping {config.rewards.reward_shaping} does not shape: leave one of them out"
        )
    if estimator.needs_whitening and not a.normalize_advantages:
        return (
            f"advantage_estimator {estimator.name} divides advantages by their spread over the "
            "batch: set normalize_advantages"
        )
    if estimator.reduction is not None and a.calculate_per_token_loss:
        return (
            f"advantage_estimator {estimator.name} divides by a constant length, which "
            "contradicts calculate_per_token_loss: leave that out, or use grpo"
        )
    if a.use_opd and a.opd_teacher_load is None:
        return "use_opd needs a teacher: set opd_teacher_load to a folder (Hugging Face)"
    if a.num_critic_only_steps > config.run.num_rollout > 0:
        return (
            f"num_critic_only_steps {a.num_critic_only_steps} leaves the policy untrained in all "
            f"{config.run.num_rollout} iterations (num_rollout): choose fewer"
        )
    return None


def _loss_type(config: RunConfig, a: AlgorithmGroup, estimator: Estimator) -> str | None:
    del config
    if a.loss_type == "custom_loss" and a.custom_loss_function_path is None:
        return "loss_type custom_loss needs a function: set custom_loss_function_path"
    if a.loss_type != "policy_loss" and estimator.token_advantages == "gae":
        return (
            f"loss_type {a.loss_type} has no critic, which advantage_estimator {estimator.name} "
            "trains: use another estimator"
        )
    if a.custom_pg_loss_reducer_function_path and estimator.reduction is not None:
        return (
            f"custom_pg_loss_reducer_function_path and advantage_estimator {estimator.name} both "
            "decide how tokens are weighed: use grpo with disable_grpo_std_normalization"
        )
    return None


def _clip(config: RunConfig, a: AlgorithmGroup, estimator: Estimator) -> str | None:
    del config
    unbounded = estimator.loss == "cispo" and a.eps_clip == 1  # the paper has no lower bound
    if a.eps_clip >= 1 and not unbounded:
        return f"eps_clip {a.eps_clip} would allow negative ratios: choose a value below 1"
    if a.eps_clip_high is not None and a.eps_clip_high <= 0:
        return f"eps_clip_high {a.eps_clip_high} must be above 0"
    if a.tis_clip_low > a.tis_clip:
        return f"tis_clip_low {a.tis_clip_low} is above tis_clip {a.tis_clip}: swap them"
    if a.rs_lower_bound is not None and a.rs_lower_bound > a.rs_upper_bound:
        return f"rs_lower_bound {a.rs_lower_bound} is above rs_upper_bound {a.rs_upper_bound}"
    if a.rs_level == "max" and a.rs_estimator == "k1":
        return (
            "rs_level max takes the token furthest away, and a ratio is far on two sides: set "
            "rs_estimator k2 or k3"
        )
    if a.tis_mode == "truncate" and a.tis_clip_low > 0:
        return "tis_mode truncate has no lower bound: use clip, or leave tis_clip_low out"
    return None


def _kl(config: RunConfig, a: AlgorithmGroup, estimator: Estimator) -> str | None:
    del config
    if a.kl_coef and a.kl_loss_coef:
        return (
            f"kl_coef {a.kl_coef} puts the KL into rewards and kl_loss_coef {a.kl_loss_coef} into "
            "the loss, where it would count twice: choose one"
        )
    if a.kl_coef and estimator.token_advantages not in _SHAPED:
        return (
            f"kl_coef {a.kl_coef} shapes token rewards, which {estimator.name} does not have: "
            "use use_kl_loss with kl_loss_coef"
        )
    return None


def _engine_log_probs(config: RunConfig, a: AlgorithmGroup, estimator: Estimator) -> str | None:
    del estimator
    if a.use_rollout_logprobs and a.use_tis:
        return (
            "use_rollout_logprobs and use_tis both correct for the engine, and together twice: "
            "choose one"
        )
    if a.use_rollout_logprobs and a.old_log_probs == "recompute":
        return (
            "use_rollout_logprobs takes the engine's log-probs as the old ones, so old_log_probs "
            "recompute would change nothing: choose one"
        )
    if a.keep_old_actor and a.old_actor_update_interval is None:
        return (
            "keep_old_actor renews a copy of the policy after some iterations: set "
            "old_actor_update_interval to 2 or more (after every one the ratio refers to the "
            "policy before the iteration anyway)"
        )
    if a.keep_old_actor and a.use_rollout_logprobs:
        return (
            "keep_old_actor and use_rollout_logprobs both say what the ratio refers to: choose one"
        )
    moved = config.num_steps > 1 or a.keep_old_actor
    if a.use_opsm and not moved and not a.use_rollout_logprobs:
        return (
            "use_opsm compares the policy with the one before the iteration's first step, and "
            "with one optimizer step an iteration they are the same: set num_steps_per_rollout "
            "above 1 or use_rollout_logprobs"
        )
    return None


def _on_policy(config: RunConfig, a: AlgorithmGroup, estimator: Estimator) -> str | None:
    del estimator
    if not a.true_on_policy_mode:
        return None
    if config.num_steps > 1:
        return (
            f"true_on_policy_mode trains each sample with the policy that generated it, but "
            f"{config.num_steps} optimizer steps an iteration move the policy in between: use one"
        )
    for name in ("use_tis", "use_rs", "use_opsm", "use_rollout_logprobs", "keep_old_actor"):
        if getattr(a, name):
            return f"true_on_policy_mode leaves {name} nothing to correct: choose one of the two"
    if a.loss_type == "sft_loss":
        return "true_on_policy_mode compares with an engine, which sft_loss does not use"
    if config.rollout.partial_rollout:
        return (
            "partial_rollout carries samples over to later policies, which true_on_policy_mode "
            "forbids: choose one"
        )
    return None
