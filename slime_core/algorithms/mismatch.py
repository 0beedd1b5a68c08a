"""How far the trainer's log-probs are from the engine's on the same tokens."""

from __future__ import annotations

from torch import Tensor

from slime_core.algorithms.corrections import Tokens
from slime_core.algorithms.masking import bounded_exp, k3_divergence, masked, row_means


def mismatch_metrics(
    train: Tensor, rollout: Tensor, mask: Tensor, rows: Tensor, num_rows: int
) -> dict[str, Tensor]:
    """Values to be reduced like a loss; those of a sequence stand on each of its tokens.

    With d = log p_train - log p_rollout on tokens the engine sampled:
    train_rollout_logprob_abs_diff |d|; mis_kl -d, an estimate of KL(rollout || train);
    mis_k3_kl exp(d) - 1 - d; mis_chi2_token exp(2d) - 1; mis_chi2_seq exp(2 sum d) - 1;
    mis_train_ppl and mis_rollout_ppl exp(-mean log p); mis_ppl_ratio their quotient
    train / rollout.

    Args:
        train, rollout: [P] log-probs.
        mask: bool [P]
        rows: int64 [P]
        num_rows: k.

    Returns:
        name -> [P], no gradient.
    """
    tokens = Tokens.of(train, rollout, mask, rows, num_rows)
    d = tokens.log_ratio

    def perplexity(log_probs: Tensor) -> Tensor:
        clean = masked(log_probs.detach(), mask)
        return bounded_exp(-row_means(clean, mask, rows, num_rows))[rows]

    return {
        "train_rollout_logprob_abs_diff": d.abs(),
        "mis_kl": -d,
        "mis_k3_kl": k3_divergence(d),
        "mis_chi2_token": bounded_exp(2 * d) - 1,
        "mis_chi2_seq": bounded_exp(2 * tokens.at("sequence")) - 1,
        "mis_train_ppl": perplexity(train),
        "mis_rollout_ppl": perplexity(rollout),
        "mis_ppl_ratio": bounded_exp(-tokens.at("geometric")),
    }
