"""The matrix of layouts: which there are, what runs on each, and what must be equal.

One job runs all cases of a layout in processes that are there already, so a layout costs a start
of the trainer a case and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.batching.types import TrainBatch, offsets_of
from tests.integration.megatron import jobs

BASE: dict[str, Any] = {
    "weight_decay": 0.0,
    "clip_grad": 0.0,
    "train_iters": 10,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 96,
    "collective_timeout_s": 60.0,
}
_FAR = 1e6


def plain_descent(rate: float) -> dict[str, Any]:
    """AdamW that is gradient descent: with an epsilon far above every gradient and no memory, an
    update is rate x gradient, to about gradient / epsilon."""
    return {"lr": rate * _FAR, "adam_eps": _FAR, "adam_beta1": 0.0, "adam_beta2": 0.0}


ADAM = {"lr": 1e-3, "clip_grad": 1.0}
SEQUENCE_RATIOS = {
    **{"advantage_estimator": "gspo", "eps_clip": 0.2, "entropy_coef": 0.01},
    **{"use_tis": True, "tis_level": "sequence", "get_mismatch_metrics": True},
    **{"use_rs": True, "rs_level": "geometric", "rs_upper_bound": 1.5},
}


@dataclass(frozen=True)
class Case:
    """algorithm: fields of AlgorithmSettings. optimizer: fields of TrainerSettings. steps: batches
    to train."""

    algorithm: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    batches: int = 3


CASES: dict[str, Case] = {
    # One step so far that the difference of the weights is the gradient to float precision.
    "gradient": Case({"advantage_estimator": "grpo"}, plain_descent(100.0), 1),
    "grpo": Case({"advantage_estimator": "grpo", "entropy_coef": 0.01}, plain_descent(0.01)),
    "adam": Case({"advantage_estimator": "grpo", "calculate_per_token_loss": True}, ADAM),
    "gspo": Case(SEQUENCE_RATIOS, plain_descent(0.01)),
    "whitening": Case(
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "gamma": 0.9},
        plain_descent(0.01),
    ),
    "ppo": Case(
        {"advantage_estimator": "ppo", "normalize_advantages": True, "critic_lr": 1e-3}, ADAM
    ),
}


@dataclass(frozen=True)
class Layout:
    """ranks: processes. options: parallel sizes. experts: for a model with experts."""

    ranks: int
    options: Mapping[str, Any]
    experts: bool = False


LAYOUTS: dict[str, Layout] = {
    "tp2": Layout(2, {"tensor_model_parallel_size": 2}),
    "tp2-sp": Layout(2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": Layout(2, {"pipeline_model_parallel_size": 2}),
    "pp2-vpp2": Layout(
        2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    ),
    "cp2": Layout(2, {"context_parallel_size": 2}),
    "dp2": Layout(2, {}),
    "tp2-pp2": Layout(4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "tp2-cp2": Layout(4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
    "cp2-dp2": Layout(4, {"context_parallel_size": 2}),
}


_EP2 = {"expert_model_parallel_size": 2}
_GATHERED = {"megatron": {"moe_token_dispatcher_type": "allgather"}}
_TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS |= {
    "experts-gathered": Layout(1, _GATHERED, experts=True),
    "ep2": Layout(2, _EP2, experts=True),
    "ep2-gathered": Layout(2, _EP2 | _GATHERED, experts=True),
    "experts-tp2-sp": Layout(2, _TP2_SP, experts=True),
    "experts-tp2-sp-ep2-etp1": Layout(
        2, _TP2_SP | _EP2 | {"expert_tensor_parallel_size": 1}, experts=True
    ),
    "experts-cp2-ep2": Layout(2, {"context_parallel_size": 2} | _EP2, experts=True),
    "ep2-dp2": Layout(4, _EP2, experts=True),
    "ep2-dp2-gathered": Layout(4, _EP2 | _GATHERED, experts=True),
    "ep2-pp2": Layout(4, {"pipeline_model_parallel_size": 2} | _EP2, experts=True),
    "ep2-tp2-sp": Layout(4, _TP2_SP | _EP2 | {"expert_tensor_parallel_size": 1}, experts=True),
}


def ragged_batch(vocab: int, seed: int) -> TrainBatch:
    """Two optimizer steps of rows of 2 tokens to 70; responses of 1, 2 and 3 among them."""
    rng = np.random.default_rng(seed)
    prompts = np.array([1, 1, 2, 1, 3, 1, 9, 20, 5, 2, 30, 6, 1, 4])
    responses = np.array([1, 2, 1, 3, 2, 7, 13, 50, 3, 31, 40, 1, 19, 24])
    rows = len(prompts)
    order = rng.permutation(rows)
    prompts, responses = prompts[order], responses[order]
    mask = (rng.random(responses.sum()) < 0.85).astype(np.uint8)
    offsets = offsets_of(responses)
    mask[offsets[5] : offsets[6]] = 0  # a row that is not trained at all
    sums = np.add.reduceat(mask.astype(np.int64), offsets[:-1]).astype(np.float64)
    rewards = rng.standard_normal(rows)
    lengths = prompts + responses
    return TrainBatch(
        tokens=rng.integers(3, vocab, lengths.sum()).astype(np.int32),
        token_offsets=offsets_of(lengths),
        response_lengths=responses.astype(np.int64),
        loss_mask=mask,
        rollout_log_probs=rng.normal(-3, 1, responses.sum()).astype(np.float32),
        response_offsets=offsets,
        rewards=rewards,
        raw_rewards=(rewards > 0).astype(np.float64),
        group_ids=np.arange(rows) // 2,
        rollout_ids=np.arange(rows),
        denominators=sums,
        steps=(tuple(range(rows // 2)), tuple(range(rows // 2, rows))),
        truncated=np.zeros(rows, np.uint8),
    )


@dataclass(frozen=True)
class Outcome:
    """steps: what the trainer reports of each. before, after: weights by Hugging Face name.
    canary: log-probs with the weights `after`."""

    steps: list[dict[str, Any]]
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    canary: list[float]


def run_layout(
    rank: int,
    ports: Sequence[int],
    layout: Layout,
    model: str,
    batches: list[TrainBatch],
    names: Sequence[str],
) -> dict[str, Outcome]:
    """All cases on one rank of a layout, one after another. Weights are those of rank 0 only.

    Args:
        ports: one a case, where its ranks meet.
    """
    found = {}
    for port, name in zip(ports, names, strict=True):
        case = CASES[name]
        place = {"rank": rank, "local_rank": rank, "world_size": layout.ranks, "master_port": port}
        settings = BASE | {"hf_checkpoint": model} | dict(case.optimizer) | place
        settings |= {key: value for key, value in layout.options.items() if key != "megatron"}
        settings["megatron"] = layout.options.get("megatron", {})
        settings["algorithm"] = AlgorithmSettings(**case.algorithm)
        used = batches[: case.batches]
        if case.batches == 1:
            used = [replace(batch, steps=batch.steps[:1]) for batch in used]
        found[name] = _run_case(settings, used)
    return found


def _run_case(settings: dict[str, Any], batches: list[TrainBatch]) -> Outcome:
    with jobs.trainer(settings) as rank:
        before = _weights(rank)
        steps = []
        for k, batch in enumerate(batches):
            result = rank.train(1, f"s{k}", f"s{k + 1}", "b", batch, k)
            steps += result["steps"]
        canary = rank.canary(batches[0].row_tokens(CANARY_ROW).tolist())
        return Outcome(steps, before, _weights(rank), canary)


def _weights(rank: Any) -> dict[str, np.ndarray]:
    copies = {name: tensor.cpu().numpy().copy() for name, tensor in rank.named_hf_tensors()}
    return copies if rank.settings.rank == 0 else {}


# Not numbers of the training itself: how the step was cut, and the bits of one layout.
_OF_LAYOUT = {"micro_batches", "weights_digest"}
# Below this size a number is a sum of terms that cancel, and rounding is that of the terms.
_TERMS = 0.1
# Losses are means of ratios times advantages of size 1 that cancel. In the first step the weights
# are equal to the bit; afterwards each term has their last bits in it.
_LOSSES = {"loss", "pg_loss"}
_LATER_LOSS_TERMS = 0.5
# Means of differences of two log-probs, each as exact as those are.
_DIFFERENCES = {"ppo_kl", "mis_kl", "mis_k3_kl", "train_rollout_logprob_abs_diff",
                "train_rollout_logprob_abs_diff_max"}  # fmt: skip
# exp(2 x the sum of a row's log-ratios): an error of the sum, some 1e-6 a token, comes doubled.
EXPONENTIALS = {"mis_chi2_seq": 2e-4}
CANARY_ROW = 7


def largest_gaps(ours: Outcome, theirs: Outcome) -> dict[str, float]:
    """How far two runs are from each other: by metric, relative; and of gradients or weights, each
    tensor's difference against what it has moved."""
    gaps: dict[str, float] = {}
    assert len(ours.steps) == len(theirs.steps)
    for number, (mine, other) in enumerate(zip(ours.steps, theirs.steps, strict=True)):
        assert mine.keys() == other.keys()
        for name in mine.keys() - _OF_LAYOUT:
            a, b = mine[name], other[name]
            if isinstance(b, float):
                terms = abs(other["rollout/log_probs"]) if name in _DIFFERENCES else _TERMS
                if number and name in _LOSSES:
                    terms = _LATER_LOSS_TERMS
                gap = abs(a - b) / max(abs(b), terms)
                gaps[name] = max(gap, gaps.get(name, 0.0))
            else:
                assert a == b, name
    if theirs.after and ours.after:
        assert ours.after.keys() == theirs.after.keys()
        for name, after in theirs.after.items():
            assert np.array_equal(ours.before[name], theirs.before[name]), name
            moved = after.astype(np.float64) - theirs.before[name]
            off = ours.after[name].astype(np.float64) - after
            gaps["moved"] = max(gaps.get("moved", 0.0), _ratio(off, moved))
            gaps["weights"] = max(gaps.get("weights", 0.0), _ratio(off, after))
    gaps["canary"] = max(abs(a - b) for a, b in zip(ours.canary, theirs.canary, strict=True))
    return gaps


def _ratio(part: np.ndarray, whole: np.ndarray) -> float:
    size = float(np.linalg.norm(whole))
    return float(np.linalg.norm(part)) / size if size else float(np.linalg.norm(part) > 0)
