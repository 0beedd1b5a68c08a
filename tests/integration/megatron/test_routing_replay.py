"""Routes of the pass for old log-probs, taken again in the training steps.

A function of the user's changes the routers between the two, so that a choice made anew is another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import models
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.batching.types import TrainBatch

BASE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.0,
    "train_iters": 10,
    "adam_eps": 1e-2,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 96,
    "collective_timeout_s": 60.0,
    "args": SimpleNamespace(),
}
RECOMPUTED: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
ONLY_MOE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CUT: dict[str, dict[str, Any]] = {
    "dp2": {},
    "ep2": {"expert_model_parallel_size": 2},
    "ep2-allgather": {
        "expert_model_parallel_size": 2,
        "megatron": {"moe_token_dispatcher_type": "allgather"},
    },
    "cp2": {"context_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2-vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
}
NAMES = ("loss", "ppo_kl", "pg_clipfrac", "grad_norm", "rollout/log_probs")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of six experts the logits of the last two lie between those of two twins before them, so that
    no token chooses them, whatever it is."""
    folder = tmp_path_factory.mktemp("routes") / "m"
    models.save_random_model(folder, "qwen3_moe", False, num_experts=6, num_hidden_layers=4)
    tensors = load_file(folder / "model.safetensors")
    gates = [name for name in tensors if name.endswith("mlp.gate.weight")]
    assert len(gates) == 4
    for name in gates:
        one, other = tensors[name][0].clone(), tensors[name][2].clone()
        between = [(one + other) / 2, (3 * one + other) / 4]
        tensors[name] = torch.stack([one, one, other, other, *between])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("routes") / "other"
    return models.save_random_model(folder, "qwen3_moe", False, num_hidden_layers=4)


def settings_of(model: str, hook: str, replay: bool, **changes: Any) -> dict[str, Any]:
    algorithm = AlgorithmSettings(
        use_routing_replay=replay,
        old_log_probs="auto" if replay else "recompute",
        custom_megatron_before_train_step_hook_path=(
            f"{Path(__file__).parent / 'hooks_given.py'}:{hook}"
        ),
        **changes,
    )
    return BASE | {"hf_checkpoint": model, "algorithm": algorithm}


def steps_of(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for result in outcome["results"] for step in result["steps"]]


@pytest.mark.parametrize(
    "changes",
    [{}, {"advantage_estimator": "ppo"}, {"use_kl_loss": True, "kl_loss_coef": 0.1}],
    ids=["grpo", "critic", "reference"],
)
def test_a_perturbed_router_leaves_the_ratio_at_exactly_one(
    changes: dict[str, Any], model: str, in_trainer: Callable[..., Any]
) -> None:
    batch = models.random_batch(models.VOCAB)
    kl = {}
    for replay in (True, False):
        settings = settings_of(model, "others_become_wanted", replay, **changes)
        (step,) = steps_of(in_trainer(jobs.train, settings, [batch]))
        kl[replay] = step["ppo_kl"]
        assert not step["skipped"] and np.isfinite(step["grad_norm"])
    assert kl[True] == 0.0
    assert abs(kl[False]) > 1e-2, "or the routers were not changed"


@pytest.mark.parametrize(
    "layout",
    [name if name == "ep2" else pytest.param(name, marks=pytest.mark.slow) for name in CUT],
)
def test_two_ranks_take_the_recorded_routes_of_all_their_tokens(
    layout: str, model: str, in_ranks: Callable[..., list[Any]]
) -> None:
    batch = models.random_batch(models.VOCAB, rows=21)
    kl = {}
    for replay in (True, False):
        settings = settings_of(model, "others_become_wanted", replay) | CUT[layout]
        found = [steps_of(one) for one in in_ranks(jobs.train_on_rank, settings, [batch])]
        assert found[0] == found[1]
        kl[replay] = found[0][0]["ppo_kl"]
    assert kl[True] == 0.0
    assert abs(kl[False]) > 1e-2, "or the routers were not changed"


def forced_loss(folder: str, batch: TrainBatch) -> dict[bool, float]:
    """The clipped loss after experts have changed their names, by plain torch, one row at a time:
    with the routes taken before that (True), and with new ones."""
    model = models.load_model(folder).double()
    gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    routes: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []

    def record(_: Any, __: Any, out: Any) -> None:
        routes.append(out[2])

    def force(_: Any, __: Any, out: Any) -> Any:
        chosen = kept.pop(0)
        scores = out[0].gather(1, chosen).softmax(-1)
        return out[0], scores, chosen

    def all_log_probs(hook: Any) -> list[torch.Tensor]:
        handles = [gate.register_forward_hook(hook) for gate in gates] if hook else []
        with torch.no_grad():
            found = [models.token_log_probs(model, batch, row) for row in range(batch.num_rows)]
        for handle in handles:
            handle.remove()
        return found

    old = all_log_probs(record)
    with torch.no_grad():
        for gate in gates:
            gate.weight.copy_(gate.weight.roll(1, 0))
    kept = list(routes)
    now = {True: all_log_probs(force), False: all_log_probs(None)}
    assert not kept
    losses = {}
    rollouts = len(set(batch.rollout_ids.tolist()))
    for replay, rows in now.items():
        total = 0.0
        for row, (new, before) in enumerate(zip(rows, old, strict=True)):
            keep = torch.from_numpy(batch.loss_mask[batch.row_response(row)]).bool()
            ratio, reward = (new - before).exp()[keep], batch.rewards[row]
            values = torch.maximum(-ratio * reward, -ratio.clamp(0.8, 1.2) * reward)
            total += values.sum().item() / max(batch.denominators[row], 1) / rollouts
        losses[replay] = total
    return losses


def test_the_loss_is_that_of_plain_torch_with_routes_forced(
    other_model: str, in_trainer: Callable[..., Any]
) -> None:
    batch = models.random_batch(models.VOCAB)
    want = forced_loss(other_model, batch)
    assert abs(want[True] - want[False]) > 1e-2
    for replay in (True, False):
        settings = settings_of(other_model, "experts_change_names", replay)
        (step,) = steps_of(in_trainer(jobs.train, settings, [batch]))
        assert step["loss"] == pytest.approx(want[replay], rel=1e-5, abs=1e-6), replay


def test_packs_of_another_shape_and_recomputing_take_the_same_routes(
    other_model: str, in_trainer: Callable[..., Any]
) -> None:
    """Two iterations of two steps each: the second one's routes are its own."""
    batches = [models.random_batch(models.VOCAB, steps=2, seed=seed) for seed in range(2)]
    settings = settings_of(other_model, "experts_change_names", True)

    def found(**changes: Any) -> list[dict[str, Any]]:
        return steps_of(in_trainer(jobs.train, settings | changes, batches))

    alike = found()
    assert len(alike) == 4
    for megatron in (RECOMPUTED, ONLY_MOE):
        assert found(megatron=megatron) == alike
    assert_same_numbers(found(log_probs_max_tokens_per_gpu=33, max_tokens_per_gpu=4096), alike)
    anew = steps_of(
        in_trainer(jobs.train, settings_of(other_model, "experts_change_names", False), batches)
    )
    assert abs(anew[0]["grad_norm"] - alike[0]["grad_norm"]) > 1e-2 * alike[0]["grad_norm"]


def assert_same_numbers(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for name in NAMES:
            assert mine[name] == pytest.approx(other[name], rel=1e-5, abs=3e-6), name


@pytest.mark.parametrize(
    "layout",
    [
        "ep2",
        "pp2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in CUT if name not in ("ep2", "pp2")),
    ],
)
def test_two_ranks_that_pack_otherwise_and_recompute_train_like_one(
    layout: str,
    other_model: str,
    in_trainer: Callable[..., Any],
    in_ranks: Callable[..., list[Any]],
) -> None:
    """Ranks train rows that others have read. In a pipeline, later micro-batches have begun where
    an earlier one is computed again."""
    batches = [models.random_batch(models.VOCAB, rows=21, steps=2, seed=1)]
    settings = settings_of(other_model, "experts_change_names", True)
    settings |= {"max_tokens_per_gpu": 64, "log_probs_max_tokens_per_gpu": 33}
    alone = steps_of(in_trainer(jobs.train, settings, batches))
    cut = settings | CUT[layout]
    cut["megatron"] = RECOMPUTED | cut.get("megatron", {})
    found = in_ranks(jobs.train_on_rank, cut, batches)
    assert_same_numbers(steps_of(found[0]), alone)
