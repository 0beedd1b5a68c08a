"""The same trainer on a CUDA GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import memory_jobs
import models
import pytest
import torch
from safetensors.torch import load_file

from slime_core.algorithms.settings import AlgorithmSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

BASE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.01,
    "adam_eps": 1e-2,
    "train_iters": 10,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 64,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save_random_model(tmp_path_factory.mktemp("cuda") / "m", "qwen3", True)


def on(device: str, model: str, **changes: Any) -> dict[str, Any]:
    return BASE | {"hf_checkpoint": model, "device": device} | changes


def steps_of(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for result in outcome["results"] for step in result["steps"]]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.3)])
def test_log_probs_equal_hugging_face(
    model: str, dtype: str, bound: float, in_fresh_process: Callable[..., Any]
) -> None:
    (tokens,) = models.sequences(models.VOCAB, (64,))
    with torch.no_grad():
        log_p = models.load_model(model)(torch.tensor([tokens])).logits[0].log_softmax(-1)
    want = log_p[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    got = torch.tensor(in_fresh_process(jobs.canary, on("cuda", model, dtype=dtype), tokens))
    assert (got - want).abs().max() < bound


def test_fp32_steps_equal_those_on_the_cpu(
    model: str, in_fresh_process: Callable[..., Any], in_trainer: Callable[..., Any]
) -> None:
    batches = [models.random_batch(models.VOCAB, seed=seed, steps=2) for seed in range(2)]
    cuda = steps_of(in_fresh_process(jobs.train, on("cuda", model), batches))
    cpu = steps_of(in_trainer(jobs.train, on("cpu", model), batches))
    for ours, theirs in zip(cuda, cpu, strict=True):
        for name in ("loss", "entropy_loss", "grad_norm", "rollout/log_probs"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name


def test_bf16_trains_saves_loads_and_exports(
    model: str, tmp_path: Path, in_fresh_process: Callable[..., Any]
) -> None:
    batches = [models.random_batch(models.VOCAB, seed=seed) for seed in range(3)]
    settings = on("cuda", model, dtype="bfloat16")
    folder, hf = str(tmp_path / "c"), tmp_path / "hf"
    whole = in_fresh_process(jobs.train, settings, batches, None, (1, folder), str(hf))
    digests = [step["weights_digest"] for step in steps_of(whole)]
    resumed = in_fresh_process(jobs.train, settings, batches[2:], folder)
    assert resumed["loaded"]["weights_digest"] == digests[1]
    assert steps_of(resumed)[0]["loss"] == pytest.approx(steps_of(whole)[2]["loss"], rel=1e-2)
    assert all(t.dtype == torch.bfloat16 for t in load_file(hf / "model.safetensors").values())
    assert not any(step["skipped"] for step in steps_of(whole))


@pytest.mark.parametrize(
    "algorithm",
    [
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 1},
        {"advantage_estimator": "ppo", "kl_coef": 0.1, "critic_lr": 1e-3},
    ],
    ids=["kl-loss", "ppo"],
)
def test_roles_compute_what_they_compute_on_the_cpu(
    model: str,
    algorithm: dict[str, Any],
    in_fresh_process: Callable[..., Any],
    in_trainer: Callable[..., Any],
) -> None:
    batches = [models.random_batch(models.VOCAB, seed=seed, steps=2) for seed in range(2)]
    chosen = {"algorithm": AlgorithmSettings(**algorithm)}
    cuda = steps_of(in_fresh_process(jobs.train, on("cuda", model, **chosen), batches))
    cpu = steps_of(in_trainer(jobs.train, on("cpu", model, **chosen), batches))
    for ours, theirs in zip(cuda, cpu, strict=True):
        for name in ("loss", "grad_norm", "rollout/ref_log_probs", "value_loss"):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name


def test_sleep_frees_the_gpu_and_changes_no_bit(
    model: str, in_fresh_process: Callable[..., Any]
) -> None:
    batches = [models.random_batch(models.VOCAB, seed=seed) for seed in range(3)]
    settings = on("cuda", model, dtype="bfloat16")
    awake = in_fresh_process(memory_jobs.naps, settings, batches, [])
    slept = in_fresh_process(memory_jobs.naps, settings, batches, [1, 2])
    assert slept["held"] == [0, 0]
    assert all(before == after for before, after in slept["digests"])
    for ours, theirs in zip(steps_of(slept), steps_of(awake), strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def test_states_on_the_host_have_the_bits_of_those_on_the_gpu(
    in_fresh_process: Callable[..., Any],
) -> None:
    found = in_fresh_process(memory_jobs.bits_of_host_adam)
    assert found["same"] and found["pinned"]
    assert found["device"] >= 3_000_000 * 8
    assert found["host"] <= -3_000_000 * 4, "the master of the first has left, too"


def test_a_trainer_of_states_on_the_host_goes_on_from_one_without(
    model: str, tmp_path: Path, in_fresh_process: Callable[..., Any]
) -> None:
    batches = [models.random_batch(models.VOCAB, seed=seed) for seed in range(2)]
    plain = on("cuda", model, dtype="bfloat16")
    device, host = str(tmp_path / "device"), str(tmp_path / "host")
    on_host = plain | {"optimizer_cpu_offload": True}
    wanted = in_fresh_process(memory_jobs.offloaded, plain, batches, device, None)["steps"]
    found = in_fresh_process(memory_jobs.offloaded, on_host, batches, host, device)
    back = in_fresh_process(memory_jobs.offloaded, plain, batches, None, host)
    assert found["host_bytes"][0] > 0
    pairs = zip(found["steps"] + found["again"] + back["again"], [*wanted, *wanted[1:] * 2],
                strict=True)  # fmt: skip
    for ours, theirs in pairs:
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def test_a_function_may_replace_some_rows_by_tensors_of_the_host(
    model: str, in_fresh_process: Callable[..., Any], in_trainer: Callable[..., Any]
) -> None:
    """As `torch.zeros(n)` makes them: beside them lie rows on the GPU."""
    path = f"{Path(__file__).parent / 'postprocess_given.py'}:rows_made_anew"
    chosen = {"algorithm": AlgorithmSettings(rollout_data_postprocess_path=path)}
    batches = [models.random_batch(models.VOCAB)]
    (ours,) = steps_of(in_fresh_process(jobs.train, on("cuda", model, **chosen), batches))
    (theirs,) = steps_of(in_trainer(jobs.train, on("cpu", model, **chosen), batches))
    for name in ("postprocess_masked_tokens", "postprocess_changed_advantages", "tokens"):
        assert ours[name] == theirs[name] > 0, name
    for name in ("loss", "grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name
