"""A checkpoint continues as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import models
import pytest

from slime_core.errors import DigestError, TrainerError
from slime_core.megatron.manifest import verify_directory

BASE: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "train_iters": 20,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 64,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.save_random_model(tmp_path_factory.mktemp("ckpt") / "m", "qwen2", False)


def batches(count: int) -> list[Any]:
    return [models.random_batch(models.VOCAB, seed=seed, steps=2) for seed in range(count)]


def results(outcome: dict[str, Any]) -> list[Any]:
    return [(result["state"], result["steps"]) for result in outcome["results"]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_process_continues_bit_for_bit(
    model: str,
    tmp_path: Path,
    dtype: str,
    in_trainer: Callable[..., Any],
    in_fresh_process: Callable[..., Any],
) -> None:
    settings = BASE | {"hf_checkpoint": model, "dtype": dtype}
    folder = str(tmp_path / "c")
    whole = in_trainer(jobs.train, settings, batches(5), None, (2, folder))
    resumed = in_fresh_process(jobs.train, settings, batches(5)[3:], folder)
    assert resumed["loaded"]["state"] == "s3"
    assert resumed["loaded"]["weights_digest"] == results(whole)[2][1][-1]["weights_digest"]
    assert results(resumed) == results(whole)[3:]
    assert not list(tmp_path.glob("*.partial"))


def test_weights_without_any_step_can_be_saved_and_loaded(
    model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    settings = BASE | {"hf_checkpoint": model}
    folder = str(tmp_path / "c")
    skipped = [(True, True)]
    in_trainer(jobs.train, settings, batches(1), None, (0, folder), None, skipped)
    resumed = in_trainer(jobs.train, settings, batches(2)[1:], folder)
    plain = in_trainer(jobs.train, settings, batches(2)[1:])
    assert [steps for _, steps in results(resumed)] == [steps for _, steps in results(plain)]


def test_the_configuration_decides_the_learning_rate_after_a_resume(
    model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    settings = BASE | {"hf_checkpoint": model, "lr_decay_style": "constant"}
    folder = str(tmp_path / "c")
    in_trainer(jobs.train, settings, batches(2), None, (1, folder))
    changed = settings | {"lr": 5e-4, "adam_beta2": 0.9, "clip_grad": 0.5}
    resumed = in_trainer(jobs.train, changed, batches(3)[2:], folder)
    assert [step["lr"] for _, steps in results(resumed) for step in steps] == [5e-4, 5e-4]


def test_the_manifest_finds_every_change(
    model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    folder = tmp_path / "c"
    settings = BASE | {"hf_checkpoint": model}
    saved = in_trainer(jobs.train, settings, batches(1), None, (0, str(folder)))["saved"]
    assert saved["bytes"] == sum(row["bytes"] for row in saved["files"].values())
    assert {"metadata.json", ".metadata"} <= set(saved["files"])
    verify_directory(folder, saved)
    weights = next(folder.glob("*.distcp"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(bytes(content))
    with pytest.raises(DigestError, match=rf"{weights.name} has changed"):
        verify_directory(folder, saved)
    weights.unlink()
    with pytest.raises(DigestError, match="is missing"):
        verify_directory(folder, saved)


def test_what_is_no_checkpoint_or_exists_already_is_refused(
    model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    settings = BASE | {"hf_checkpoint": model}
    with pytest.raises(TrainerError, match="no finished checkpoint"):
        in_trainer(jobs.train, settings, [], str(tmp_path))
    with pytest.raises(TrainerError, match="exists already"):
        in_trainer(jobs.train, settings, batches(1), None, (0, str(tmp_path)))
