"""How much memory a trainer rank takes at its peak. Imports neither torch nor megatron.

States are counted; activations and logits follow from two factors that were measured on the CPU
(benchmarks/trainer_memory.py holds the sum to within 15 %): what a layer keeps for the backward
pass, gradients on their way and the allocator's slack together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.megatron.selection import trained_names
from slime_core.megatron.settings import TrainerSettings
from slime_core.weights.tables import ModelShape, bind, padded_vocab_size

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
LAYER_COPIES = 8
"""Values a token that a layer holds, for each unit of its width, heads and feed-forward width."""
EXPERT_COPIES = 0.5
"""The same of the hidden size, for each expert of a token."""
LOGIT_COPIES = 5
"""float32 copies of logits that are alive at the peak of the backward pass."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of the rank that holds most, without what libraries take for themselves.

    Attributes:
        states_bytes: weights, float32 gradients and those optimizer states that a GPU's host does
            not keep (optimizer_cpu_offload).
        update_bytes: float32 masters that the host keeps; they come for the length of an update.
        activations_bytes: of the micro-batches whose backward pass is to come.
        logits_bytes: as if each token was trained.
    """

    states_bytes: int
    update_bytes: int
    activations_bytes: int
    logits_bytes: int

    @property
    def peak_bytes(self) -> int:
        passes = self.activations_bytes + self.logits_bytes
        return self.states_bytes + max(passes, self.update_bytes)


def share_on_host(settings: TrainerSettings) -> float:
    """Of optimizer states, which a GPU has no room to keep for. A CPU's memory is the host's."""
    away = settings.optimizer_cpu_offload and settings.device == "cuda"
    return settings.optimizer_offload_fraction if away else 0.0


def trainer_memory(settings: TrainerSettings, shape: ModelShape, tokens: int) -> TrainerMemory:
    """Memory of the policy's training.

    Args:
        settings: resolved ones (arguments.resolve), with Megatron's other options in `megatron`.
        tokens: of a micro-batch.
    """
    return TrainerMemory(
        *_states(settings, shape),
        _activations(settings, shape, tokens),
        _logits(settings, shape, tokens),
    )


def _states(settings: TrainerSettings, shape: ModelShape) -> tuple[int, int]:
    """(states_bytes, update_bytes) of TrainerMemory."""
    entries = bind(shape)
    names = [entry.megatron for entry in entries]
    chosen = trained_names(
        names, settings.only_train_params_name_list, settings.freeze_params_name_list
    )
    weight = DTYPE_BYTES[settings.dtype]
    # Adam's moments, and float32 masters in bf16, lie in parts on the data-parallel ranks.
    masters, away = (4 if settings.dtype == "bfloat16" else 0), share_on_host(settings)
    shared = (8 + masters) * (1 - away)
    stages = settings.pipeline_model_parallel_size
    total, visiting = 0.0, 0.0
    for experts in (False, True):
        sizes = {
            entry.megatron: sum(math.prod(size) for size in entry.hf_shapes)
            for entry in entries
            if (entry.expert is not None) == experts
        }
        trained = sum(size for name, size in sizes.items() if name in chosen)
        cut = settings.expert_cut if experts else settings.tensor_model_parallel_size
        copies = settings.world_size // (stages * cut) if experts else settings.data_parallel_size
        total += (sum(sizes.values()) * weight + trained * (4 + shared / copies)) / (stages * cut)
        visiting += trained * away * masters / copies / (stages * cut)
    return int(total), int(visiting)


def _activations(settings: TrainerSettings, shape: ModelShape, tokens: int) -> int:
    tensor = settings.tensor_model_parallel_size
    width = shape.hidden_size / (tensor if settings.sequence_parallel else 1)
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim / tensor
    feed_forward = shape.ffn_size / tensor
    if shape.expert_ffn_size is not None and shape.experts_per_token is not None:
        # A token's copies for its experts, there and back, and what these make of them.
        way = EXPERT_COPIES * shape.hidden_size
        feed_forward = shape.experts_per_token * (shape.expert_ffn_size + way) / tensor
    layer = LAYER_COPIES * (width + heads + feed_forward)
    # The first stage of a pipeline holds as many micro-batches as there are stages; of an
    # interleaved one those of its warm-up and one more, in pieces.
    layers: float = shape.num_layers
    if settings.virtual_stages is not None:
        stages, virtual = settings.pipeline_model_parallel_size, settings.virtual_stages
        layers *= (2 * (stages - 1) + (virtual - 1) * stages + 1) / (stages * virtual)
    kept = layers * _kept_a_layer(settings.megatron, layer, width, LAYER_COPIES * feed_forward)
    values = (kept + layer) * tokens / settings.context_parallel_size
    return int(values * DTYPE_BYTES[settings.dtype])


def _kept_a_layer(
    options: Mapping[str, Any], layer: float, width: float, feed_forward: float
) -> float:
    """Values a token that a layer keeps until its backward pass."""
    if options.get("recompute_granularity") == "full":
        return width
    if "mlp" in (options.get("recompute_modules") or ()):
        return layer - feed_forward
    return layer


def _logits(settings: TrainerSettings, shape: ModelShape, tokens: int) -> int:
    vocab = padded_vocab_size(
        shape.vocab_size,
        settings.make_vocab_size_divisible_by,
        settings.tensor_model_parallel_size,
    )
    at_once = min(tokens // settings.context_parallel_size, settings.logits_chunk(vocab))
    return LOGIT_COPIES * 4 * at_once * vocab // settings.tensor_model_parallel_size
