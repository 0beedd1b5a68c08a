"""A checkpoint continues as if nothing had happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jobs
import memory_jobs
import models
import pytest

from slime_core.errors import TrainerError

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


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
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


def test_one_written_beside_training_is_that_of_its_moment(
    model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    settings = BASE | {"hf_checkpoint": model}
    plain, beside = tmp_path / "plain", tmp_path / "beside"
    in_trainer(jobs.train, settings, batches(1), None, (0, str(plain)))
    found = in_trainer(memory_jobs.saved_beside, settings, batches(1), batches(3)[1:], str(beside))
    assert found == {"early": False, "busy": False}
    assert not list(tmp_path.glob("*.partial"))
    runs = [in_trainer(jobs.train, settings, batches(2)[1:], str(f)) for f in (plain, beside)]
    assert results(runs[0]) == results(runs[1])
    assert runs[1]["loaded"]["state"] == "s1"


def test_a_rank_that_cannot_write_stops_the_save_of_all(
    model: str, tmp_path: Path, in_ranks: Callable[..., list[Any]]
) -> None:
    """And none of them waits for the other, or is tainted: the next save succeeds."""
    settings = BASE | {"hf_checkpoint": model, "tensor_model_parallel_size": 2}
    first, second = in_ranks(jobs.failed_save, settings, str(tmp_path / "c"))
    assert first == second
    assert "rank 1: OSError" in first["error"] and "File too large" in first["error"]
    assert not first["tainted"]
    assert [path.name for path in tmp_path.iterdir()] == ["c-again"]


@pytest.mark.slow
def test_killed_while_it_writes_leaves_nothing_that_counts(model: str, tmp_path: Path) -> None:
    settings = BASE | {"hf_checkpoint": model}
    folder = tmp_path / "c"
    process = get_context("spawn").Process(
        target=jobs.write_slowly, args=(settings, batches(1)[0], str(folder))
    )
    process.start()
    deadline = time.monotonic() + 60
    while not folder.with_suffix(".trained").exists():
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.join()
    partial = tmp_path / "c.partial"
    assert list(partial.glob("*.distcp")), "it was killed in the middle"
    assert not (partial / "metadata.json").exists() and not folder.exists()


@pytest.mark.parametrize("damage", ["cut", "gone", "index"])
def test_a_damaged_one_is_refused_by_its_name(
    damage: str, model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    """Its digests are looked at before; this is what comes of one that was damaged since."""
    settings, folder = BASE | {"hf_checkpoint": model}, tmp_path / "c"
    in_trainer(jobs.train, settings, batches(1), None, (0, str(folder)))
    weights = next(folder.glob("*.distcp"))
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:2000])
    elif damage == "gone":
        weights.unlink()
    else:
        (folder / ".metadata").write_bytes(b"")
    with pytest.raises(TrainerError, match=f"checkpoint {folder} cannot be read: "):
        in_trainer(jobs.train, settings, batches(1), str(folder))


def test_what_is_no_checkpoint_or_exists_already_is_refused(
    model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    settings = BASE | {"hf_checkpoint": model}
    with pytest.raises(TrainerError, match="no finished checkpoint"):
        in_trainer(jobs.train, settings, [], str(tmp_path))
    with pytest.raises(TrainerError, match="exists already"):
        in_trainer(jobs.train, settings, batches(1), None, (0, str(tmp_path)))
