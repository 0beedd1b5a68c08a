"""The same numbers in every layout: loss, gradients, metrics and weights are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_core.batching.types import TrainBatch
from slime_core.engines.embedded.weights import places
from tests.integration.megatron import invariance, models
from tests.integration.megatron.algorithm_runs import near_policy
from tests.integration.megatron.conftest import free_ports, new_pool
from tests.integration.megatron.invariance import CASES, LAYOUTS, Layout, Outcome, largest_gaps

LAYOUT_TIMEOUT_S = 560.0
NUMBERS = 1e-5
GRADIENT = 1e-5
WEIGHTS = 1e-6
# Adam divides by the gradient's own size, so rounding noise becomes an update where it is all there
# is: what is bounded is each tensor's way, not each weight.
ADAM = 1e-3
CANARY_NATS = 1e-4
ON_CUDA = {"device": "cuda"}
TIED = "model.embed_tokens.weight"
Run = Callable[[str, Layout], list[dict[str, Outcome]]]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tied, four layers, a vocabulary that padding has to round up."""
    folder = tmp_path_factory.mktemp("invariance") / "dense"
    return models.save_random_model(
        folder, "qwen3", True, num_hidden_layers=4, initializer_range=0.1
    )


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four experts in each of four layers, two of them for each token."""
    folder = tmp_path_factory.mktemp("invariance") / "sparse"
    return models.save_random_model(
        folder, "qwen3_moe", False, num_hidden_layers=4, initializer_range=0.1
    )


def batches_of(model: str) -> list[TrainBatch]:
    """Engine log-probs near the model's own, so that ratios are neither 1 nor all clipped."""
    return [near_policy(model, invariance.ragged_batch(models.VOCAB, seed)) for seed in range(3)]


@pytest.fixture(scope="module")
def run() -> Run:
    """All cases on all ranks of a layout, in processes of its own as in a run: where one rank fails
    the others wait for it, and would hold up every layout that came after in the same processes."""
    batches: dict[str, list[TrainBatch]] = {}

    def on_ranks(model: str, layout: Layout) -> list[dict[str, Outcome]]:
        if model not in batches:
            batches[model] = batches_of(model)
        ports = free_ports(len(CASES))
        args = (ports, layout, model, batches[model], list(CASES))
        pools = [new_pool() for _ in range(layout.ranks)]
        try:
            pending = [
                pool.submit(invariance.run_layout, rank, *args) for rank, pool in enumerate(pools)
            ]
            return [future.result(LAYOUT_TIMEOUT_S) for future in pending]
        finally:
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)

    return on_ranks


@pytest.fixture(scope="module")
def alone(run: Run, dense: str) -> dict[str, Outcome]:
    return run(dense, Layout(1, {}))[0]


@pytest.fixture(scope="module")
def alone_sparse(run: Run, sparse: str) -> dict[str, Outcome]:
    return run(sparse, Layout(1, {}, experts=True))[0]


@pytest.fixture(scope="module")
def one_gpu(run: Run, dense: str) -> dict[str, Outcome]:
    return run(dense, Layout(1, ON_CUDA))[0]


@pytest.fixture(scope="module")
def one_gpu_sparse(run: Run, sparse: str) -> dict[str, Outcome]:
    return run(sparse, Layout(1, ON_CUDA, experts=True))[0]


def assert_same(case: str, ours: Outcome, theirs: Outcome) -> None:
    gaps = largest_gaps(ours, theirs)
    far = sorted(gaps.items(), key=lambda gap: -gap[1])[:4]
    print(case, *(f"{name} {gap:.1e}" for name, gap in far))
    moved, weights, canary = (gaps.pop(name) for name in ("moved", "weights", "canary"))
    allowed = {name: invariance.EXPONENTIALS.get(name, NUMBERS) for name in gaps}
    assert not {name: gap for name, gap in gaps.items() if gap > allowed[name]}, case
    if case == "gradient":
        assert moved < GRADIENT
        return
    assert canary < CANARY_NATS
    assert moved < ADAM
    if CASES[case].optimizer is not invariance.ADAM:
        assert weights < WEIGHTS


def assert_all_same(model: str, ranks: list[dict[str, Outcome]], alone: dict[str, Outcome]) -> None:
    for case in CASES:
        first = ranks[0][case]
        for other in ranks[1:]:
            assert other[case].steps == first.steps, "all ranks report the same"
        assert_same(case, first, alone[case])
    assert_export_is_the_model(model, batches_of(model)[0], ranks[0]["grpo"])


def assert_export_is_the_model(model: str, batch: TrainBatch, outcome: Outcome) -> None:
    """The Hugging Face model with the exported weights gives the canary's log-probs."""
    other = models.load_model(model)
    with torch.no_grad():
        for name, place in places(other).items():
            place.copy_(torch.from_numpy(outcome.after.get(name, outcome.after.get(TIED))))
        tokens = torch.from_numpy(batch.row_tokens(invariance.CANARY_ROW).astype(np.int64))
        log_probs = other(tokens[None]).logits[0, :-1].log_softmax(-1)
        wanted = log_probs.gather(-1, tokens[1:, None])[:, 0].numpy()
    assert np.abs(np.array(outcome.canary) - wanted).max() < CANARY_NATS


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_numbers_of_one_rank(
    layout: str, run: Run, request: pytest.FixtureRequest
) -> None:
    experts = LAYOUTS[layout].experts
    model: str = request.getfixturevalue("sparse" if experts else "dense")
    alone = request.getfixturevalue("alone_sparse" if experts else "alone")
    ranks = run(model, LAYOUTS[layout])
    assert_all_same(model, ranks, alone)


@pytest.mark.slow
def test_the_reference_itself_moves(alone: dict[str, Outcome], tmp_path: Path) -> None:
    """What the matrix compares is not nothing: each case trains, and differently."""
    norms = {case: outcome.steps[0]["grad_norm"] for case, outcome in alone.items()}
    assert all(norm > 0.1 for norm in norms.values()), norms
    for case, outcome in alone.items():
        assert not any(step["skipped"] for step in outcome.steps)
        for name, after in outcome.after.items():
            assert not np.array_equal(after, outcome.before[name]), (case, name)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("layout", [name for name, it in LAYOUTS.items() if it.ranks <= 2])
def test_a_layout_over_nccl_gives_the_numbers_of_one_gpu(
    layout: str, run: Run, request: pytest.FixtureRequest
) -> None:
    chosen = LAYOUTS[layout]
    model: str = request.getfixturevalue("sparse" if chosen.experts else "dense")
    alone = request.getfixturevalue("one_gpu_sparse" if chosen.experts else "one_gpu")
    ranks = run(model, Layout(chosen.ranks, {**chosen.options, **ON_CUDA}, chosen.experts))
    assert_all_same(model, ranks, alone)
