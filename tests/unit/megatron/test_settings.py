"""What a trainer's settings refuse."""

from __future__ import annotations

from typing import Any

import pytest

from slime_core.algorithms.settings import AlgorithmSettings
from slime_core.errors import ConfigError
from slime_core.megatron.settings import TrainerSettings

TWO = {"world_size": 2, "master_port": 1, "tensor_model_parallel_size": 2}
CUSTOM = AlgorithmSettings(loss_type="custom_loss", custom_loss_function_path="f.py")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context_parallel_size": 2}, "1 trainer ranks .* context_parallel_size 2"),
        ({"world_size": 3, "tensor_model_parallel_size": 2}, "3 trainer ranks"),
        ({"sequence_parallel": True}, "sequence_parallel needs"),
        ({"world_size": 2}, "master_port"),
        ({"use_dynamic_batch_size": True}, "max_tokens_per_gpu"),
        ({"rollout_temperature": 0.0}, "rollout_temperature"),
        ({"lr_warmup_iters": 5, "train_iters": 5}, "lr_warmup_iters 5"),
        ({"lr": 1e-6, "min_lr": 1e-5}, "min_lr"),
        ({"optimizer_offload_fraction": 0.5}, "0.5 has no meaning without optimizer_cpu_offload"),
        ({"lr_decay_style": "WSD"}, "lr_wsd_decay_iters"),
        (TWO | {"algorithm": CUSTOM}, "whole logits, which tensor-parallel ranks do not hold"),
    ],
)
def test_refusals_name_the_setting(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainerSettings(hf_checkpoint="x", **changes).check()


def test_defaults_pass_and_sizes_multiply() -> None:
    TrainerSettings(hf_checkpoint="x").check()
    settings = TrainerSettings(
        hf_checkpoint="x",
        world_size=8,
        master_port=1,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
    )
    settings.check()
    assert (settings.model_parallel_size, settings.data_parallel_size) == (4, 2)


def test_chunks_of_logits_follow_from_the_vocabulary() -> None:
    def chunk(vocab: int, **changes: Any) -> int:
        return TrainerSettings(hf_checkpoint="x", **changes).logits_chunk(vocab)

    assert chunk(152_064) == 854
    assert chunk(152_064, tensor_model_parallel_size=2) == 1709
    assert chunk(152_064, logits_chunk_tokens=7) == 7
    assert chunk(10**9) == 1
