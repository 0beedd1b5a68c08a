"""The same numbers as Hugging Face, and the same bytes back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import models
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slime_core.errors import TrainerError
from slime_core.weights.digest import tensors_digest

LENGTHS = (10, 10, 3, 17, 64, 1, 10, 33)
FAMILIES = [(family, tied) for family in ("qwen3", "qwen2", "llama") for tied in (True, False)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, shipped_model: str) -> dict[str, str]:
    base = tmp_path_factory.mktemp("hf")
    made = {
        f"{family}-{'tied' if tied else 'untied'}": models.save_random_model(
            base / f"{family}-{tied}", family, tied
        )
        for family, tied in FAMILIES
    }
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    made["llama3-rope"] = models.save_random_model(
        base / "llama3", "llama", False, rope_parameters=rope
    )
    for name, normalized in (("experts", True), ("experts-not-normalized", False)):
        made[name] = models.save_random_model(
            base / name, "qwen3_moe", False, norm_topk_prob=normalized
        )
    return made | {"shipped": shipped_model}


ROUNDING = 2e-5
"""Processors sum in different orders: one H200 host's CPU is 1.1e-5 off."""
EXPERTS = ["experts", "experts-not-normalized"]
NAMES = [f"{family}-{'tied' if tied else 'untied'}" for family, tied in FAMILIES]


@pytest.mark.parametrize("name", [*NAMES, "llama3-rope", *EXPERTS, "shipped"])
def test_logits_and_log_probs_equal_hugging_face(
    name: str, folders: dict[str, str], in_trainer: Callable[..., Any]
) -> None:
    model = models.load_model(folders[name])
    rows = models.sequences(model.config.vocab_size, LENGTHS)  # type: ignore[union-attr,arg-type]
    with torch.no_grad():
        want = torch.cat([model(torch.tensor([row])).logits[0] for row in rows])
    settings = {"hf_checkpoint": folders[name]}
    got = torch.from_numpy(in_trainer(jobs.logits, settings, rows))
    assert want.abs().max() > 1
    assert (got - want).abs().max() < ROUNDING

    longest = rows[LENGTHS.index(64)]
    with torch.no_grad():
        log_p = model(torch.tensor([longest])).logits[0].log_softmax(-1)
    chosen = log_p[:-1].gather(1, torch.tensor(longest[1:])[:, None])[:, 0]
    got = torch.tensor(in_trainer(jobs.canary, settings, longest))
    assert (got - chosen).abs().max() < ROUNDING


@pytest.mark.parametrize(
    "name", ["qwen3-tied", "qwen2-untied", "llama-untied", "experts", "shipped"]
)
def test_export_gives_the_same_bytes_and_loads(
    name: str, folders: dict[str, str], tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    source, target = Path(folders[name]), tmp_path / "export"
    summary = in_trainer(jobs.export, {"hf_checkpoint": str(source)}, str(target))
    want = load_file(source / "model.safetensors")
    got = load_file(target / "model.safetensors")
    assert set(got) == set(want)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert summary == {
        "digest": tensors_digest(want.items()),
        "bytes": sum(t.numel() * 4 for t in want.values()),
        "tensors": len(want),
    }
    with safe_open(target / "model.safetensors", "pt") as file:
        assert file.metadata()["weight_version"] == "a-0"
    side_files = {p.name for p in source.iterdir()} - {"model.safetensors"}
    for file_name in side_files:
        assert json_or_bytes(target / file_name) == json_or_bytes(source / file_name)
    assert {p.name for p in tmp_path.iterdir()} == {"export"}
    models.load_model(str(target))


def json_or_bytes(path: Path) -> Any:
    return json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes()


def test_export_replaces_an_older_folder_and_can_cut_files(
    folders: dict[str, str], tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    source, target = Path(folders["llama-untied"]), tmp_path / "export"
    target.mkdir()
    (target / "leftover").write_text("old")
    in_trainer(jobs.export, {"hf_checkpoint": str(source)}, str(target), 100_000)
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 1
    assert not (target / "leftover").exists()
    model, other = models.load_model(str(source)), models.load_model(str(target))
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_bf16_export_says_so_in_its_config(
    folders: dict[str, str], tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    source, target = Path(folders["qwen3-tied"]), tmp_path / "export"
    settings = {"hf_checkpoint": str(source), "dtype": "bfloat16"}
    in_trainer(jobs.export, settings, str(target))
    want = load_file(source / "model.safetensors")
    got = load_file(target / "model.safetensors")
    assert all(torch.equal(got[name], want[name].bfloat16()) for name in want)
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_checkpoint_that_does_not_fit_its_config_is_one_clear_error(
    folders: dict[str, str], tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    source = Path(folders["qwen3-tied"])
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    config = json.loads((source / "config.json").read_text())
    for changes, words in (
        ({"intermediate_size": 64}, r"gate_proj\.weight has shape \[96, 64\]"),
        ({"model_type": "llama"}, "tensors that a llama model"),
        ({"num_hidden_layers": 4}, "has no tensor 'model.layers.3"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(Exception, match=words) as caught:
            in_trainer(jobs.canary, {"hf_checkpoint": str(tmp_path)}, [1, 2])
        assert type(caught.value).__name__ == "ConfigError"


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_model_that_holds_nan_is_refused_before_it_trains(
    size: int,
    folders: dict[str, str],
    tmp_path: Path,
    in_trainer: Callable[..., Any],
    in_ranks: Callable[..., list[Any]],
) -> None:
    shutil.copytree(folders["qwen3-tied"], tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][-1, -1] = float("nan")
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    settings = {"hf_checkpoint": str(tmp_path / "m"), "tensor_model_parallel_size": size}
    wanted = r"1 of the actor's weights hold NaN or Inf, such as decoder.layers.1.*were read from"
    with pytest.raises(TrainerError, match=wanted):
        if size == 1:
            in_trainer(jobs.train, settings, [])
        in_ranks(jobs.train_on_rank, settings, [])
