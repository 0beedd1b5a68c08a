"""A whole optimizer step, from batch to gradient, on a tiny model: what it is cut into and what
stands in places that are not trained must not change loss, gradients or metrics."""

from functools import partial

import numpy as np
import pytest
import torch

from slime_core.algorithms.corrections import Rejection, importance_weights, reject
from slime_core.algorithms.log_probs import chunked_log_probs, log_probs_and_entropy
from slime_core.algorithms.losses.types import PolicyOptions
from slime_core.algorithms.objective import Objective, ObjectiveInputs, evaluate
from slime_core.algorithms.registry import POLICY_LOSSES
from slime_core.batching.pack import pack
from slime_core.batching.schedule import SchedulePolicy, SequenceCost, schedule_step
from slime_core.batching.select import rollout_denominators, step_totals
from slime_core.batching.types import TrainBatch, offsets_of, segment_sums
from slime_core.errors import ConfigError

VOCAB, HIDDEN, TEMPERATURE = 17, 6, 0.8
PROMPTS = np.array([2, 3, 1, 4, 2, 1, 5])
RESPONSES = np.array([5, 2, 7, 3, 4, 6, 0])
ROLLOUTS = np.array([0, 1, 1, 2, 3, 4, 5])  # rows 1 and 2 fanned out of one rollout
TIS = partial(importance_weights, mode="clip", low=0.5, high=1.5)
SEQUENCES = partial(importance_weights, level="sequence", mode="mask", low=0.5, high=1.5)
REJECTION = partial(
    reject,
    weights=partial(importance_weights, level="geometric"),
    rejection=Rejection("seq_mean", "k3", 0.1),
    veto=0.4,
)
OBJECTIVES = {
    "ppo": Objective(POLICY_LOSSES["ppo"], PolicyOptions(0.2, 0.28, 1.5)),
    "everything": Objective(
        POLICY_LOSSES["ppo"],
        PolicyOptions(0.2, 0.28),
        entropy_coef=0.02,
        kl_loss_coef=0.1,
        kl_loss_type="low_var_kl",
        use_unbiased_kl=True,
        correction=TIS,
        opsm_delta=0.02,
        mismatch_metrics=True,
    ),
    "per-token": Objective(
        POLICY_LOSSES["cispo"], PolicyOptions(0.2, 0.28), reduction="token_mean", entropy_coef=0.01
    ),
    "dr_grpo": Objective(
        POLICY_LOSSES["ppo"], PolicyOptions(), reduction="constant_length", constant_length=8
    ),
    "gspo": Objective(POLICY_LOSSES["gspo"], PolicyOptions(0.1, 0.15)),
    "sapo": Objective(POLICY_LOSSES["sapo"], PolicyOptions(), correction=SEQUENCES),
    "gmpo": Objective(POLICY_LOSSES["gmpo"], PolicyOptions(0.1, 0.15), correction=REJECTION),
    "ipo": Objective(POLICY_LOSSES["ipo_tv"], PolicyOptions(ipo_threshold=0.03)),
    "gpg": Objective(POLICY_LOSSES["policy_gradient"], PolicyOptions()),
    "sft": Objective(POLICY_LOSSES["sft"], PolicyOptions(), reduction="token_mean"),
}
POLICIES = {
    "one by one": SchedulePolicy(micro_batch_size=1),
    "static": SchedulePolicy(micro_batch_size=3),
    "dynamic": SchedulePolicy(max_tokens=14),
    "balanced": SchedulePolicy(max_tokens=14, cost=SequenceCost(1.0, 0.1)),
}


class Case:
    """A batch with the columns that other models would give, all from one seed."""

    def __init__(self, poison=0.0, order=None):
        rng = np.random.default_rng(0)
        order = np.arange(7) if order is None else np.asarray(order)
        rows = np.repeat(np.arange(7), RESPONSES)
        mask = (rng.random(RESPONSES.sum()) < 0.7) & (rows != 3)  # row 3 is not trained at all
        columns = {
            name: -np.log(VOCAB) + rng.normal(0, 0.3, RESPONSES.sum())
            for name in ("rollout", "old", "ref")
        }
        columns["advantages"] = rng.normal(size=7)[rows]
        for column in columns.values():
            column[~mask] = poison
        sequences = [rng.integers(0, VOCAB, n) for n in PROMPTS + RESPONSES]
        place = np.concatenate([np.flatnonzero(rows == row) for row in order])
        self.columns = {name: torch.tensor(c[place]) for name, c in columns.items()}
        mask, responses = mask[place].astype(np.uint8), RESPONSES[order]
        offsets, rollouts = offsets_of(responses), ROLLOUTS[order]
        self.batch = TrainBatch(
            tokens=np.concatenate([sequences[row] for row in order]).astype(np.int32),
            token_offsets=offsets_of((PROMPTS + RESPONSES)[order]),
            response_lengths=responses,
            loss_mask=mask,
            rollout_log_probs=self.columns["rollout"].numpy().astype(np.float32),
            response_offsets=offsets,
            rewards=np.zeros(7),
            raw_rewards=np.zeros(7),
            group_ids=np.zeros(7, dtype=np.int64),
            rollout_ids=rollouts,
            denominators=rollout_denominators(segment_sums(mask, offsets), rollouts),
            steps=(tuple(range(7)),),
            truncated=np.zeros(7, dtype=np.uint8),
        )


def model():
    generator = torch.Generator().manual_seed(0)
    table = 0.3 * torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    return table.requires_grad_()


def hidden_states(table, tokens, positions):
    """Each position sees its token and the one before it in the same sequence."""
    before = torch.roll(table[tokens], 1, 0).masked_fill((positions == 0)[:, None], 0.0)
    return table[tokens] + 0.5 * before


def run(case, objective, policy, dp_size=1, *, pad_to=1, pad_token=0, positions="trained", chunk=8):
    """Loss, gradient and metrics of the step, summed over micro-batches and ranks."""
    batch, table = case.batch, model()
    step = batch.steps[0]
    totals = step_totals(step, batch.rollout_ids, batch.mask_sums)
    total, metrics = 0.0, {}
    for rank in schedule_step(batch.lengths.tolist(), step, dp_size, policy).ranks:
        for rows in rank:
            packed = pack(batch, rows, pad_to=pad_to, pad_token=pad_token, positions=positions)
            index = torch.tensor(packed.response_index)
            states = hidden_states(
                table, torch.tensor(packed.tokens), torch.tensor(packed.position_ids)
            )
            log_probs, entropy = chunked_log_probs(
                lambda h: h @ table.T,
                states[torch.tensor(packed.logit_index)],
                torch.tensor(packed.targets),
                TEMPERATURE,
                chunk,
            )
            result = evaluate(
                objective,
                ObjectiveInputs(
                    log_probs=log_probs,
                    entropy=entropy,
                    old_log_probs=case.columns["old"][index],
                    advantages=case.columns["advantages"][index],
                    mask=torch.tensor(batch.loss_mask[packed.response_index] == 1),
                    rows=torch.tensor(packed.rows),
                    denominators=torch.tensor(batch.denominators[list(packed.row_ids)]),
                    rollouts=totals.rollouts,
                    tokens=totals.tokens,
                    trained_rollouts=totals.trained_rollouts,
                    rollout_log_probs=case.columns["rollout"][index],
                    ref_log_probs=case.columns["ref"][index],
                ),
            )
            result.loss.backward()
            total += result.loss.item()
            for name, value in result.metrics.items():
                metrics[name] = metrics.get(name, 0.0) + value.item()
    return total, table.grad, metrics


def assert_same(ours, expected):
    assert ours[0] == pytest.approx(expected[0], rel=1e-11)
    torch.testing.assert_close(ours[1], expected[1], rtol=1e-10, atol=1e-13)
    assert ours[2] == pytest.approx(expected[2], rel=1e-10, abs=1e-13)


@pytest.fixture(scope="module", params=OBJECTIVES)
def reference(request):
    objective = OBJECTIVES[request.param]
    return objective, run(Case(), objective, SchedulePolicy(micro_batch_size=7), chunk=1000)


@pytest.mark.parametrize("dp_size", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_micro_batches_and_ranks_change_nothing(reference, policy, dp_size):
    objective, expected = reference
    assert expected[1].abs().max() > 1e-3, "the step must teach something for this to mean anything"
    assert_same(run(Case(), objective, POLICIES[policy], dp_size), expected)


def test_padding_and_reading_untrained_positions_change_nothing(reference):
    objective, expected = reference
    for token in (0, 16):
        for positions in ("trained", "response"):
            ours = run(
                Case(poison=float("nan")),
                objective,
                POLICIES["static"],
                pad_to=32,
                pad_token=token,
                positions=positions,
            )
            assert_same(ours, expected)


def test_the_order_of_samples_changes_nothing(reference):
    objective, expected = reference
    assert_same(run(Case(order=[4, 2, 6, 0, 5, 1, 3]), objective, POLICIES["dynamic"], 2), expected)


def test_the_step_equals_a_plain_statement_on_separate_padded_rows():
    """Row by row, right-padded, plain autograd: the formula as one would write it on paper."""
    case, table = Case(), model()
    batch, columns = case.batch, case.columns
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(7):
        ids = torch.zeros(20, dtype=torch.long)
        ids[: batch.lengths[row]] = torch.tensor(batch.row_tokens(row).astype(np.int64))
        logits = hidden_states(table, ids, torch.arange(20)) @ table.T / TEMPERATURE
        log_p = logits.log_softmax(-1)
        for j in range(int(batch.response_lengths[row])):
            flat = int(batch.response_offsets[row]) + j
            if not batch.loss_mask[flat]:
                continue
            at = int(batch.prompt_lengths[row]) + j
            lp = log_p[at - 1, ids[at]]
            a, old, rollout = (columns[n][flat] for n in ("advantages", "old", "rollout"))
            ratio = (lp - old).exp()
            term = torch.maximum(-ratio * a, -ratio.clamp(0.8, 1.28) * a)
            term = term * (old - rollout).exp().clamp(0.5, 1.5)
            entropy = -(log_p[at - 1].exp() * log_p[at - 1]).sum()
            d = lp - columns["ref"][flat]
            kl = (-d).exp() - 1 + d
            weight = 1 / batch.denominators[row] / 6
            loss = loss + weight * (term - 0.02 * entropy + 0.1 * kl)
    loss.backward()
    objective = Objective(
        POLICY_LOSSES["ppo"],
        PolicyOptions(0.2, 0.28),
        entropy_coef=0.02,
        kl_loss_coef=0.1,
        kl_loss_type="k3",
        correction=TIS,
    )
    ours = run(case, objective, POLICIES["dynamic"], 2, pad_to=8)
    assert ours[0] == pytest.approx(loss.item(), rel=1e-11)
    torch.testing.assert_close(ours[1], table.grad, rtol=1e-10, atol=1e-13)


def test_rejected_sequences_leave_the_loss_but_not_the_denominator():
    plain = OBJECTIVES["ppo"]
    opsm = Objective(plain.policy_loss, plain.options, opsm_delta=-10.0)
    case = Case()
    trained = case.batch.loss_mask == 1
    good = case.columns["advantages"].numpy() >= 0
    assert (trained & good).any() and (trained & ~good).any()
    loss, grad, metrics = run(case, opsm, POLICIES["static"])
    silenced = Case()
    silenced.columns["advantages"] = silenced.columns["advantages"].clamp(min=0)
    expected = run(silenced, plain, POLICIES["static"])
    assert loss == pytest.approx(expected[0], rel=1e-11)
    torch.testing.assert_close(grad, expected[1])
    assert 0 < metrics["opsm_clipfrac"] < 1


def test_metrics_are_means_over_what_is_trained():
    for name in ("ppo", "per-token", "dr_grpo"):
        _, _, metrics = run(Case(), OBJECTIVES[name], POLICIES["static"])
        assert 2.5 < metrics["entropy_loss"] < np.log(VOCAB), "the model is close to uniform"


def test_a_rank_without_rows_takes_part_with_zero(reference):
    objective, expected = reference
    assert_same(run(Case(), objective, POLICIES["one by one"], dp_size=9), expected)


def test_entropy_and_kl_with_coefficient_zero_are_metrics_only():
    plain = OBJECTIVES["ppo"]
    watched = Objective(plain.policy_loss, plain.options, kl_loss_coef=0.0, kl_loss_type="k2")
    loss, grad, metrics = run(Case(), watched, POLICIES["static"])
    expected = run(Case(), plain, POLICIES["static"])
    assert loss == expected[0] and torch.equal(grad, expected[1])
    assert metrics["kl_loss"] > 0 and metrics["entropy_loss"] > 0


def test_missing_log_probs_are_named():
    one, row = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    log_probs, entropy = log_probs_and_entropy(torch.zeros(1, 3), row)
    x = ObjectiveInputs(log_probs, entropy, one, one, one == 0, row, one + 1, 1, 1, 1)
    with pytest.raises(ConfigError, match="--ref-load"):
        evaluate(Objective(POLICY_LOSSES["ppo"], PolicyOptions(), kl_loss_coef=0.1), x)
    with pytest.raises(ConfigError, match="rollout log-probs"):
        evaluate(Objective(POLICY_LOSSES["ppo"], PolicyOptions(), correction=TIS), x)
