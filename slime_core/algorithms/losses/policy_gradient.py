"""Losses with the plain policy gradient: no ratio, or one without gradient."""

from __future__ import annotations

from slime_core.algorithms.losses.types import PolicyInputs, PolicyOptions, TokenLoss
from slime_core.algorithms.masking import bounded_exp


def policy_gradient(inputs: PolicyInputs, options: PolicyOptions) -> TokenLoss:
    """-A log p: REINFORCE, GPG.

    Williams 1992, "Simple statistical gradient-following algorithms".
    """
    del options
    loss = -inputs.advantages * inputs.log_probs
    return TokenLoss(loss, {"ppo_kl": -inputs.log_ratio.detach()})


def cispo(inputs: PolicyInputs, options: PolicyOptions) -> TokenLoss:
    """-stop_gradient(clip(r, 1 - eps, 1 + eps_high)) A log p: clips the weight, not the token.

    MiniMax-M1, arXiv:2506.13585. Clipped tokens keep a gradient. The paper has no lower bound:
    use eps_clip 1 for that.

    Returns:
        Loss [P]; metrics pg_clipfrac (ratios outside the bounds) and ppo_kl.
    """
    ratio = bounded_exp(inputs.log_ratio).detach()
    weight = ratio.clamp(1 - options.eps_clip, 1 + options.high)
    loss = -weight * inputs.advantages * inputs.log_probs
    clipped = (weight != ratio).to(loss.dtype)
    return TokenLoss(loss, {"pg_clipfrac": clipped, "ppo_kl": -inputs.log_ratio.detach()})


def ipo_tv(inputs: PolicyInputs, options: PolicyOptions) -> TokenLoss:
    """-A r on tokens whose probability moved by at most a threshold, plus tau (log r)^2 on all.

    The move |p - p_old| is a token's part of the total variation, a trust region that does not
    blow up on rare tokens as a ratio does (prime-rl's IPO).

    Returns:
        Loss [P]; metrics pg_clipfrac (tokens left out) and ppo_kl.
    """
    log_ratio = inputs.log_ratio
    moved = (inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()).abs()
    inside = moved <= options.ipo_threshold
    gain = bounded_exp(log_ratio) * inputs.advantages
    loss = -gain.where(inside, gain.new_zeros(())) + options.ipo_kl_tau * log_ratio**2
    metrics = {"pg_clipfrac": (~inside).to(loss.dtype), "ppo_kl": -log_ratio.detach()}
    return TokenLoss(loss, metrics)


def sft(inputs: PolicyInputs, options: PolicyOptions) -> TokenLoss:
    """-log p: supervised fine-tuning; advantages are not used."""
    del options
    return TokenLoss(-inputs.log_probs)
