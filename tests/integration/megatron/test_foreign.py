"""A run may begin with what Megatron-LM or slime have saved, without running what lies there."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import models
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.errors import ConfigError


@pytest.fixture(scope="module")
def saved(folder: Path, reference: str, in_trainer: Callable[..., Any]) -> Path:
    """Weights of another model than `model`, saved by Megatron's own writer."""
    in_trainer(
        jobs.write_as_megatron_lm,
        {"hf_checkpoint": reference}, str(folder / "megatron"), str(folder / "sprung"),
    )  # fmt: skip
    (folder / "sprung").unlink(missing_ok=True)
    return folder / "megatron"


def assert_same_weights(exported: Path, reference: str) -> None:
    ours = load_file(exported / "model.safetensors")
    theirs = load_file(Path(reference) / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_weights_begin_as_they_were_saved(
    saved: Path, model: str, reference: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    settings = {"hf_checkpoint": model, "megatron_load": str(saved)}
    in_trainer(jobs.export, settings, str(tmp_path / "hf"))
    assert_same_weights(tmp_path / "hf", reference)
    assert not (saved.parent / "sprung").exists(), "common.pt was not read"
    one = settings | {"megatron_load": str(saved / "iter_0000007")}
    batch = [models.random_batch(models.VOCAB)]
    begun = in_trainer(jobs.train, one, batch)
    plain = in_trainer(jobs.train, {"hf_checkpoint": reference}, batch)
    assert begun["start"] == plain["start"], "a run of its own begins there"
    assert begun["results"][0]["steps"] == plain["results"][0]["steps"], "masters, too"


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{"tensor_model_parallel_size": 2},
     {"pipeline_model_parallel_size": 2, "megatron": {"decoder_first_pipeline_num_layers": 1}},
     {"pipeline_model_parallel_size": 2, "megatron": {"decoder_last_pipeline_num_layers": 1}}],
)  # fmt: skip
def test_any_layout_reads_them(
    layout: dict[str, Any],
    saved: Path,
    model: str,
    reference: str,
    tmp_path: Path,
    in_ranks: Callable[..., list[Any]],
) -> None:
    settings = {"hf_checkpoint": model, "megatron_load": str(saved)} | layout
    in_ranks(jobs.export_on_rank, settings, str(tmp_path / "hf"))
    assert_same_weights(tmp_path / "hf", reference)


def test_a_reference_named_by_its_folder_is_read_though_the_start_was_another_checkpoint(
    saved: Path, model: str, reference: str, in_trainer: Callable[..., Any]
) -> None:
    """hf_checkpoint gives the shape here and the reference, not the weights that are trained."""
    batch = [models.random_batch(models.VOCAB)]

    def divergence(**chosen: Any) -> float:
        algorithm = AlgorithmSettings(
            use_kl_loss=True, kl_loss_coef=0.1, ref_load=chosen.pop("ref")
        )
        [step] = in_trainer(jobs.train, chosen | {"algorithm": algorithm}, batch)["results"][0][
            "steps"
        ]
        return step["kl_loss"]

    begun = {"hf_checkpoint": model, "megatron_load": str(saved)}
    plain = divergence(hf_checkpoint=reference, ref=model)
    assert abs(plain) > 1e-4
    assert divergence(**begun, ref=model) == plain
    assert divergence(**begun, ref=None) == divergence(**begun, ref=str(saved)) == 0.0


def test_a_critic_begins_where_the_policy_does(
    saved: Path, model: str, reference: str, in_trainer: Callable[..., Any]
) -> None:
    batches = [models.random_batch(models.VOCAB, seed=seed) for seed in (0, 1)]
    algorithm = AlgorithmSettings(advantage_estimator="ppo", critic_lr=1e-3)

    def steps(**chosen: str) -> list[Any]:
        results = in_trainer(jobs.train, chosen | {"algorithm": algorithm}, batches)["results"]
        return [result["steps"] for result in results]

    begun = steps(hf_checkpoint=model, megatron_load=str(saved))
    assert begun == steps(hf_checkpoint=reference)
    assert begun[0][0]["critic_grad_norm"] > 0


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("damage", ["trap", "cut", "format", "gone", "mark"])
def test_what_is_no_plain_checkpoint_is_refused_by_name(
    damage: str, saved: Path, model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(saved, bad)
    index, words = bad / "iter_0000007" / ".metadata", "is no index of a checkpoint"
    if damage == "trap":
        index.write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
        words = "it names posix.mkdir"
    elif damage == "cut":
        index.write_bytes(index.read_bytes()[:-100])
    elif damage == "format":
        (bad / "iter_0000007" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
        words = "format 'zarr'; torch_dist is read"
    elif damage == "gone":
        index.unlink()
        words = "is no torch_dist checkpoint"
    else:
        (bad / "latest_checkpointed_iteration.txt").write_text("9")
        words = "names 9, but"
    settings = {"hf_checkpoint": model, "megatron_load": str(bad)}
    with pytest.raises(ConfigError, match=words):
        in_trainer(jobs.export, settings, str(tmp_path / "hf"))
    assert not (tmp_path / "sprung").exists()


def changed_index(folder: Path, change: Callable[[Any], None]) -> None:
    """Rewrites the index of the checkpoint in a copy, as its owner could."""
    index = folder / "iter_0000007" / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    change(metadata)
    index.write_bytes(pickle.dumps(metadata))


def test_objects_beside_the_weights_are_never_opened(
    saved: Path, model: str, reference: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    """Layers of Megatron's save an object each, a pickle, and would ask for it back."""
    bad = tmp_path / "bad"
    shutil.copytree(saved, bad)
    file = io.BytesIO()
    torch.save(Trap(tmp_path / "sprung"), file)
    (bad / "iter_0000007" / "trap.distcp").write_bytes(file.getvalue())
    objects = []

    def change(metadata: Any) -> None:
        for at, info in metadata.storage_data.items():
            if isinstance(metadata.state_dict_metadata[at.fqn], BytesStorageMetadata):
                objects.append(at.fqn)
                info.relative_path, info.offset = "trap.distcp", 0
                info.length = len(file.getvalue())

    changed_index(bad, change)
    assert any("_extra_state" in name for name in objects)
    in_trainer(
        jobs.export, {"hf_checkpoint": model, "megatron_load": str(bad)}, str(tmp_path / "hf")
    )
    assert_same_weights(tmp_path / "hf", reference)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("damage", ["object", "elsewhere", "class"])
def test_an_index_that_calls_something_else_a_tensor_is_refused(
    damage: str, saved: Path, model: str, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(saved, bad)
    key = "decoder.final_layernorm.weight"

    def change(metadata: Any) -> None:
        if damage == "object":
            metadata.state_dict_metadata[key] = BytesStorageMetadata()
        else:
            [info] = [i for at, i in metadata.storage_data.items() if at.fqn == key]
            info.relative_path = "../../secret.distcp"

    words = {"object": f"{key} is no tensor there", "elsewhere": "names '../../secret.distcp'",
             "class": "it changes <class"}[damage]  # fmt: skip
    if damage == "class":
        text = b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n(N}S'x'\nI1\nstb."
        (bad / "iter_0000007" / ".metadata").write_bytes(text)
    else:
        changed_index(bad, change)
    with pytest.raises(ConfigError, match=words):
        in_trainer(
            jobs.export, {"hf_checkpoint": model, "megatron_load": str(bad)}, str(tmp_path / "hf")
        )


def test_another_model_is_refused(
    saved: Path, tmp_path: Path, in_trainer: Callable[..., Any]
) -> None:
    other = models.save_random_model(tmp_path / "m", "qwen3", True, num_hidden_layers=5)
    settings = {"hf_checkpoint": other, "megatron_load": str(saved)}
    with pytest.raises(ConfigError, match="does not hold the weights of this model"):
        in_trainer(jobs.export, settings, str(tmp_path / "hf"))
