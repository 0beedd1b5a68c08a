"""What a trainer is told about the algorithm, under the names of the flags. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime_core.algorithms.advantages.registry import Estimator, get_estimator
from slime_core.errors import ConfigError


@dataclass(frozen=True)
class AlgorithmSettings:
    """Names and defaults are those of the configuration's group `algorithm`, where each is
    explained; what contradicts what is refused there.

    Attributes:
        max_response_len: tokens that reduction constant_length divides by (Dr.GRPO).

    Raises:
        ConfigError: a name that does not exist, or an estimator that lacks what it needs.
    """

    advantage_estimator: str = "grpo"
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = "policy_loss"
    disable_compute_advantages_and_returns: bool = False
    normalize_advantages: bool = False
    gamma: float = 1.0
    lambd: float = 1.0

    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    ipo_threshold: float = 0.1
    ipo_kl_tau: float = 1e-3
    entropy_coef: float = 0.0
    calculate_per_token_loss: bool = False
    old_log_probs: Literal["auto", "recompute"] = "auto"
    max_response_len: int | None = None
    use_routing_replay: bool = False
    use_rollout_routing_replay: bool = False

    keep_old_actor: bool = False
    old_actor_update_interval: int | None = None

    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl", "abs"] = "k1"
    use_unbiased_kl: bool = False
    kl_coef: float = 0.0
    kl_target: float | None = None
    kl_horizon: int = 10_000
    ref_load: str | None = None
    ref_update_interval: int | None = None

    use_rollout_logprobs: bool = False
    use_tis: bool = False
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    tis_mode: Literal["clip", "truncate", "mask"] = "clip"
    tis_batch_normalize: bool = False
    use_rs: bool = False
    rs_level: Literal["token", "sequence", "geometric", "max"] = "token"
    rs_estimator: Literal["k1", "k2", "k3"] = "k1"
    rs_upper_bound: float = 2.0
    rs_lower_bound: float | None = None
    rs_veto_threshold: float | None = None
    true_on_policy_mode: bool = False
    get_mismatch_metrics: bool = False
    use_opsm: bool = False
    opsm_delta: float = 1e-4

    use_opd: bool = False
    opd_kl_coef: float = 1.0
    opd_teacher_load: str | None = None

    custom_loss_function_path: str | None = None
    custom_advantage_function_path: str | None = None
    custom_tis_function_path: str | None = None
    custom_pg_loss_reducer_function_path: str | None = None
    rollout_data_postprocess_path: str | None = None
    custom_megatron_init_path: str | None = None
    custom_megatron_before_log_prob_hook_path: str | None = None
    custom_megatron_before_train_step_hook_path: str | None = None

    value_clip: float = 0.2
    critic_lr: float | None = None
    num_critic_only_steps: int = 0

    def __post_init__(self) -> None:
        estimator = self.estimator
        if estimator.needs_whitening and not self.normalize_advantages:
            raise ConfigError(f"{estimator.name} needs normalize_advantages")
        if self.reduction == "constant_length" and not self.max_response_len:
            raise ConfigError(f"{estimator.name} needs the longest response (max_response_len)")
        if self.use_opd and not self.opd_teacher_load:
            raise ConfigError("use_opd needs a teacher: set opd_teacher_load")
        if self.keep_old_actor and not self.old_actor_update_interval:
            raise ConfigError("keep_old_actor needs old_actor_update_interval")
        if self.use_routing_replay and self.loss_type == "sft_loss":
            raise ConfigError(
                "use_routing_replay takes the routes of the pass for old log-probs, which sft_loss "
                "has not: leave it out"
            )
        if self.use_rollout_routing_replay and self.loss_type == "sft_loss":
            raise ConfigError(
                "use_rollout_routing_replay takes the routes of an engine, and sft_loss uses none: "
                "leave it out"
            )
        if (self.loss_type == "custom_loss") != bool(self.custom_loss_function_path):
            raise ConfigError("loss_type custom_loss and custom_loss_function_path need each other")

    @property
    def estimator(self) -> Estimator:
        """The entry of the registry."""
        return get_estimator(self.advantage_estimator)

    @property
    def reduction(self) -> str:
        """How the loss weighs tokens: the estimator's own way, or the configured one."""
        configured = "token_mean" if self.calculate_per_token_loss else "sample_mean"
        return self.estimator.reduction or configured

    @property
    def replays_routes(self) -> bool:
        """Whether tokens go to experts that were chosen before, not by the router of now."""
        return self.use_routing_replay or self.use_rollout_routing_replay

    @property
    def uses_reference(self) -> bool:
        return self.use_kl_loss or self.kl_coef > 0

    @property
    def copies_of_policy(self) -> dict[str, int]:
        """Roles that become a copy of the policy, and after how many iterations each."""
        intervals = {
            "reference": self.ref_update_interval if self.uses_reference else None,
            "old_actor": self.old_actor_update_interval if self.keep_old_actor else None,
        }
        return {role: interval for role, interval in intervals.items() if interval}

    @property
    def uses_critic(self) -> bool:
        return self.estimator.token_advantages == "gae"

    def needs_old_log_probs(self, steps: int) -> bool:
        """True if an iteration needs a forward pass for the policy's log-probs before its steps.

        With one step the current log-probs are the old ones, and with `use_rollout_logprobs` the
        engine's take their place; token rewards, functions of the user's that look at the whole
        iteration, the mean weight of a step and routes to be replayed need them before any step.
        Supervised training has no ratio.

        Args:
            steps: optimizer steps of the iteration.
        """
        if self.loss_type == "sft_loss":
            return False
        own_routes = self.use_routing_replay and not self.use_rollout_routing_replay
        if self.tis_batch_normalize or self.keep_old_actor or own_routes:
            return True
        if self.use_rollout_logprobs:
            return self.get_mismatch_metrics and steps > 1
        if self.custom_advantage_function_path or self.rollout_data_postprocess_path:
            return True
        return self.old_log_probs == "recompute" or steps > 1 or self.kl_coef > 0 or self.use_opd
