"""Routes of the pass for old log-probs, or the engine's, taken again in the training steps.

A function of the user's changes the routers between the two, so that a choice made anew is another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import models
import numpy as np
import pytest
import route_jobs
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


def settings_of(
    model: str, hook: str, replay: bool, engine: bool = False, **changes: Any
) -> dict[str, Any]:
    algorithm = AlgorithmSettings(
        use_routing_replay=replay,
        use_rollout_routing_replay=engine,
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


class PlainRoutes:
    """The model in plain torch, one row at a time, with routes of its own or with given ones."""

    def __init__(self, folder: str, batch: TrainBatch) -> None:
        self.model = models.load_model(folder).double()
        self.gates = [
            gate for name, gate in self.model.named_modules() if name.endswith("mlp.gate")
        ]
        self.batch = batch

    def rolled(self, by: int) -> PlainRoutes:
        """Each expert gets the logit of the one `by` before it."""
        with torch.no_grad():
            for gate in self.gates:
                gate.weight.copy_(gate.weight.roll(by, 0))
        return self

    def own(self) -> list[torch.Tensor]:
        """[tokens of the row, k] row by row, and layer by layer in each."""
        routes: list[torch.Tensor] = []
        self.log_probs(lambda _, __, out: routes.append(out[2]))
        return routes

    def log_probs(self, hook: Any = None) -> list[torch.Tensor]:
        handles = [gate.register_forward_hook(hook) for gate in self.gates] if hook else []
        with torch.no_grad():
            rows = range(self.batch.num_rows)
            found = [models.token_log_probs(self.model, self.batch, row) for row in rows]
        for handle in handles:
            handle.remove()
        return found

    def forced(self, routes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Log-probs where tokens go where they are sent."""
        left = list(routes)

        def force(_: Any, __: Any, out: Any) -> Any:
            chosen = left.pop(0)
            return out[0], out[0].gather(1, chosen).softmax(-1), chosen

        found = self.log_probs(force)
        assert not left
        return found

    def loss(self, old: list[torch.Tensor], now: list[torch.Tensor]) -> float:
        """The clipped loss."""
        batch, total = self.batch, 0.0
        for row, (new, before) in enumerate(zip(now, old, strict=True)):
            keep = torch.from_numpy(batch.loss_mask[batch.row_response(row)]).bool()
            ratio, reward = (new - before).exp()[keep], batch.rewards[row]
            values = torch.maximum(-ratio * reward, -ratio.clamp(0.8, 1.2) * reward)
            total += values.sum().item() / max(batch.denominators[row], 1)
        return total / len(set(batch.rollout_ids.tolist()))

    def as_of_engine(self, routes: list[torch.Tensor]) -> TrainBatch:
        """The batch with these routes as an engine tells them: not of a row's last token."""
        layers = len(self.gates)
        rows = [torch.stack(routes[at : at + layers], 1) for at in range(0, len(routes), layers)]
        told = tuple(row[:-1].numpy().astype(np.uint8) for row in rows)
        return replace(self.batch, routes=told)


def forced_loss(folder: str, batch: TrainBatch) -> dict[bool, float]:
    """The loss after experts have changed their names: with the routes taken before that (True),
    and with new ones."""
    plain = PlainRoutes(folder, batch)
    routes = plain.own()
    old = plain.log_probs()
    plain.rolled(1)
    return {
        True: plain.loss(old, plain.forced(routes)),
        False: plain.loss(old, plain.log_probs()),
    }


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


def of_another_router(folder: str) -> tuple[TrainBatch, float]:
    """A batch with the routes of an engine whose router is another one, and the loss of a step in
    which both passes take them and the trainer's own router has changed in between."""
    plain = PlainRoutes(folder, models.random_batch(models.VOCAB, rows=21))
    own = plain.log_probs()
    routes = plain.rolled(2).own()
    old = plain.rolled(-2).forced(routes)
    assert max((a - b).abs().max() for a, b in zip(own, old, strict=True)) > 1e-2
    plain.rolled(1)
    batch = plain.as_of_engine(routes)
    want = plain.loss(old, plain.forced(routes))
    assert abs(want - plain.loss(old, plain.log_probs())) > 1e-2
    return batch, want


def test_all_passes_of_the_policy_take_the_routes_of_the_engine(
    model: str, other_model: str, in_trainer: Callable[..., Any]
) -> None:
    batch, want = of_another_router(other_model)
    settings = settings_of(other_model, "experts_change_names", False, engine=True)
    (step,) = steps_of(in_trainer(jobs.train, settings, [batch]))
    assert step["loss"] == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert step["engine_routes"] == 1 - batch.num_rows / len(batch.tokens)

    plain = PlainRoutes(model, models.random_batch(models.VOCAB))
    settings = settings_of(model, "others_become_wanted", False, engine=True)
    (step,) = steps_of(in_trainer(jobs.train, settings, [plain.as_of_engine(plain.own())]))
    assert step["ppo_kl"] == 0.0, "the trainer's own routes, told by the engine"


def test_tokens_without_routes_and_padding_go_where_the_router_says(
    other_model: str, in_trainer: Callable[..., Any]
) -> None:
    batch = models.random_batch(models.VOCAB, rows=5)
    told = [np.full((length - 1, 4, 2), [3, 2], np.uint8) for length in batch.lengths]
    told[3] = None  # type: ignore[call-overload] # nothing in it is trained
    batch = replace(batch, routes=tuple(told))
    settings = settings_of(other_model, "experts_change_names", False, engine=True)
    places = [*range(len(batch.tokens)), -1, -1]
    last = {*(batch.token_offsets[1:] - 1), *range(*batch.token_offsets[3:5]), -1}
    want = [[0, 1] if place in last else [3, 2] for place in places]
    found = in_trainer(route_jobs.choices, settings, batch, places)
    assert len(found) == 2 * 4, "both passes through all layers"
    assert all(one.tolist() == want for one in found)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep2", "cp2", "tp2-sp", "pp2-vpp2"])
def test_two_ranks_take_the_routes_of_the_engine(
    layout: str, other_model: str, in_ranks: Callable[..., list[Any]]
) -> None:
    batch, want = of_another_router(other_model)
    settings = settings_of(other_model, "experts_change_names", False, engine=True) | CUT[layout]
    settings |= {"log_probs_max_tokens_per_gpu": 33, "megatron": RECOMPUTED}
    found = [steps_of(one) for one in in_ranks(jobs.train_on_rank, settings, [batch])]
    assert found[0] == found[1]
    assert found[0][0]["loss"] == pytest.approx(want, rel=1e-5, abs=1e-6)
