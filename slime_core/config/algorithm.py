"""The group `algorithm` of the configuration. docs/algorithms.md has the formulas."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slime_core.config.base import Group, Identity, Numeric

EstimatorName = Literal[
    "grpo",
    "dr_grpo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "ipo",
    "rloo",
    "opo",
    "gpg",
    "remax",
    "max_rl",
    "pass_at_k",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "ppo",
]


class AlgorithmGroup(Group):
    """Advantages and losses."""

    advantage_estimator: Numeric[EstimatorName] = "grpo"
    """How rewards become advantages, and which policy loss goes with them."""
    loss_type: Numeric[Literal["policy_loss", "sft_loss", "custom_loss"]] = "policy_loss"
    """What is minimised: the policy loss, minus the mean log-prob (supervised), or what
    custom_loss_function_path gives."""
    disable_compute_advantages_and_returns: Numeric[bool] = False
    """Compute no advantages (sft_loss, custom_loss)."""
    disable_grpo_std_normalization: Numeric[bool] = False
    """GRPO without division by the group's standard deviation (Dr. GRPO)."""
    disable_rewards_normalization: Numeric[bool] = False
    """Use rewards as they are, without the group's mean."""
    normalize_advantages: Numeric[bool] = False
    """Whiten advantages over all trained tokens of the iteration; REINFORCE++ needs it."""
    gamma: Numeric[float] = Field(default=1.0, ge=0, le=1)
    """Discount of token rewards (reinforce_plus_plus, ppo)."""
    lambd: Numeric[float] = Field(default=1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation (ppo)."""

    eps_clip: Numeric[float] = Field(default=0.2, gt=0)
    """Lower clip range of the probability ratio."""
    eps_clip_high: Numeric[float | None] = None
    """Upper clip range; default eps_clip."""
    eps_clip_c: Numeric[float | None] = Field(default=None, gt=1)
    """Dual-clip bound for negative advantages (losses that clip as PPO does)."""
    sapo_tau_pos: Numeric[float] = Field(default=1.0, gt=0)
    """SAPO's temperature for positive advantages."""
    sapo_tau_neg: Numeric[float] = Field(default=1.05, gt=0)
    """SAPO's temperature for negative advantages."""
    ipo_threshold: Numeric[float] = Field(default=0.1, gt=0)
    """Change of a token's probability beyond which IPO leaves it out."""
    ipo_kl_tau: Numeric[float] = Field(default=1e-3, ge=0)
    """Weight of IPO's squared log-ratio."""
    entropy_coef: Numeric[float] = 0.0
    """Weight of the entropy bonus."""
    calculate_per_token_loss: Numeric[bool] = False
    """Average over all tokens of the batch instead of first over each sample."""
    old_log_probs: Numeric[Literal["auto", "recompute"]] = "auto"
    """auto skips the separate forward pass where the current log-probs are the old ones (one
    optimizer step a rollout); recompute always runs it."""
    use_routing_replay: Numeric[bool] = False
    """Models with experts: in training, each token goes to the experts that it went to where its
    old log-probs were computed, although the router has changed since. Engines' routes, where
    use_rollout_routing_replay asks for them, go before."""
    use_rollout_routing_replay: Numeric[bool] = False
    """Models with experts: in training and where old log-probs are computed, each token goes to the
    experts that it went to in the engine. Engines tell them, and they are stored."""

    keep_old_actor: Numeric[bool] = False
    """The ratio refers to a copy of the policy that is renewed after every
    old_actor_update_interval-th iteration, not after each."""
    old_actor_update_interval: Numeric[int | None] = Field(default=None, ge=2)
    """Iterations after which the old actor becomes a copy of the policy (keep_old_actor)."""

    use_kl_loss: Numeric[bool] = False
    """Add the KL divergence from the reference to the loss, and report it."""
    kl_loss_coef: Numeric[float] = Field(default=0.0, ge=0)
    """Weight of the KL in the loss; 0 makes it a metric."""
    kl_loss_type: Numeric[Literal["k1", "k2", "k3", "low_var_kl", "abs"]] = "k1"
    """Estimator of the KL, in the loss and in rewards."""
    use_unbiased_kl: Numeric[bool] = False
    """Weigh the KL of the loss by the importance ratio, so that its gradient is right."""
    kl_coef: Numeric[float] = Field(default=0.0, ge=0)
    """Weight of the KL in token rewards (reinforce_plus_plus, its baseline variant, ppo)."""
    kl_target: Numeric[float | None] = Field(default=None, gt=0)
    """KL a token (nats) that the coefficient adapts to after each iteration; fixed without it."""
    kl_horizon: Numeric[int] = Field(default=10_000, ge=1)
    """Samples over which the coefficient adapts (kl_target)."""
    ref_load: Identity[str | None] = None
    """Folder of the reference (Hugging Face, or a Megatron checkpoint); by default the weights that
    training begins with. Read only if a KL is used."""
    ref_update_interval: Numeric[int | None] = Field(default=None, ge=1)
    """Iterations after which the reference becomes a copy of the policy; never without it."""

    use_rollout_logprobs: Numeric[bool] = False
    """The ratio refers to the log-probs that the engine reported instead of recomputed ones."""
    use_tis: Numeric[bool] = False
    """Weigh token losses by the bounded ratio of trainer to engine probabilities."""
    tis_clip: Numeric[float] = Field(default=2.0, gt=0)
    """Upper bound of the weights of use_tis."""
    tis_clip_low: Numeric[float] = Field(default=0.0, ge=0)
    """Lower bound of the weights of use_tis."""
    tis_level: Numeric[Literal["token", "sequence", "geometric"]] = "token"
    """Ratio of each token, of the whole sequence (product) or its geometric mean."""
    tis_mode: Numeric[Literal["clip", "truncate", "mask"]] = "clip"
    """Outside the bounds: clip to both, truncate to the upper one, or mask (IcePop: weight 0)."""
    tis_batch_normalize: Numeric[bool] = False
    """Divide the weights of use_tis by their mean over the optimizer step."""
    use_rs: Numeric[bool] = False
    """Leave out tokens or sequences whose ratio of trainer to engine is out of bounds."""
    rs_level: Numeric[Literal["token", "sequence", "geometric", "max"]] = "token"
    """What use_rs judges: each token; or a sequence as a whole by the sum, mean or largest of its
    tokens' values."""
    rs_estimator: Numeric[Literal["k1", "k2", "k3"]] = "k1"
    """What use_rs measures: k1 the ratio of trainer to engine, k2 or k3 an estimate of the KL."""
    rs_upper_bound: Numeric[float] = Field(default=2.0, gt=0)
    """Largest ratio (k2, k3: KL) that use_rs keeps."""
    rs_lower_bound: Numeric[float | None] = Field(default=None, ge=0)
    """Smallest ratio that use_rs keeps; default 1 / rs_upper_bound."""
    rs_veto_threshold: Numeric[float | None] = Field(default=None, gt=0)
    """Leave out sequences in which any token's ratio is below it."""
    true_on_policy_mode: Numeric[bool] = False
    """Stop where a sample was not generated by the very policy that it trains: one optimizer step
    an iteration, nothing carried over, trainer and engine log-probs equal."""
    get_mismatch_metrics: Numeric[bool] = False
    """Report how far trainer and engine log-probs are apart (mis_*)."""
    use_opsm: Numeric[bool] = False
    """Leave out whole sequences of negative advantage that are far from the old policy."""
    opsm_delta: Numeric[float] = Field(default=1e-4, ge=0)
    """Mean log-ratio beyond which use_opsm leaves a sequence out."""

    use_opd: Numeric[bool] = False
    """On-policy distillation: advantages also pull towards a teacher."""
    opd_kl_coef: Numeric[float] = Field(default=1.0, ge=0)
    """Weight of the log-ratio of policy to teacher in the advantages (use_opd)."""
    opd_teacher_load: Identity[str | None] = None
    """Folder of the teacher (Hugging Face), of the policy's own architecture (use_opd)."""

    custom_loss_function_path: Numeric[str | None] = None
    """Import path of `loss(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)`."""
    custom_advantage_function_path: Numeric[str | None] = None
    """Import path of `advantages(args, rollout_data)`, which sets `advantages` and `returns`."""
    custom_tis_function_path: Numeric[str | None] = None
    """Import path of the correction that use_tis applies, in the place of the built-in weights."""
    custom_pg_loss_reducer_function_path: Numeric[str | None] = None
    """Import path of a function that gives the reduction of the policy loss."""
    rollout_data_postprocess_path: Numeric[str | None] = None
    """Import path of `postprocess(args, rollout_id, rollout_data)`, called before the first step
    with log-probs and advantages; it may take tokens out of `loss_masks` and change columns."""
    custom_megatron_init_path: Numeric[str | None] = None
    """Import path of `init(args)`, called on each rank when they have met, before the model."""
    custom_megatron_before_log_prob_hook_path: Numeric[str | None] = None
    """Import path of `hook(args, model, store_prefix)`, called before log-probs are read."""
    custom_megatron_before_train_step_hook_path: Numeric[str | None] = None
    """Import path of `hook(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)`,
    called before the gradients of each optimizer step."""

    value_clip: Numeric[float] = Field(default=0.2, gt=0)
    """Range around the old value within which the critic may move in one iteration (ppo)."""
    critic_lr: Numeric[float | None] = Field(default=None, ge=0)
    """Learning rate of the critic; default lr (ppo)."""
    num_critic_only_steps: Numeric[int] = Field(default=0, ge=0)
    """Iterations at the start in which only the critic is trained (ppo)."""
