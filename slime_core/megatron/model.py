"""The policy: Megatron's GPTModel from a Hugging Face config.json and weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig

from slime_core.errors import ConfigError
from slime_core.megatron import parallel
from slime_core.megatron.arguments import ResolvedOptions, has_parameter
from slime_core.megatron.attention import Pack
from slime_core.megatron.divisible import check_divisible
from slime_core.megatron.layer_spec import decoder_spec
from slime_core.megatron.rotary import rotary_frequencies, rotary_tables
from slime_core.megatron.selection import trained_names
from slime_core.megatron.settings import TrainerSettings
from slime_core.weights.hf_files import HFTensors
from slime_core.weights.tables import BoundEntry, ModelShape, bind, padded_vocab_size

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(
    settings: TrainerSettings, shape: ModelShape, options: dict[str, Any]
) -> TransformerConfig:
    """Megatron's configuration of the model.

    Args:
        settings: resolved settings.
        shape: what config.json says.
        options: further fields (ResolvedOptions.transformer).
    """
    dtype = DTYPES[settings.dtype]
    fields: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": has_parameter(shape, "self_attention.linear_qkv.bias"),
        "qk_layernorm": has_parameter(shape, "self_attention.q_layernorm.weight"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "perform_initialization": False,  # load_weights fills and marks every parameter
        "tensor_model_parallel_size": settings.tensor_model_parallel_size,
        "pipeline_model_parallel_size": settings.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": settings.virtual_stages,
        "context_parallel_size": settings.context_parallel_size,
        "expert_model_parallel_size": settings.expert_model_parallel_size,
        "sequence_parallel": settings.sequence_parallel,
        # Packed micro-batches differ in length from one to the next.
        "variable_seq_lengths": settings.pipeline_model_parallel_size > 1,
        # step.py hands over gradients that need no further scaling, only sums.
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }
    # Variable lengths in a pipeline need this dispatcher's protocol, also without experts.
    fields["moe_token_dispatcher_type"] = "alltoall"
    if settings.virtual_stages is not None:
        # Of two stages each is before and behind the other, so messages must not go in batches.
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if shape.num_experts is not None:
        fields |= _expert_fields(shape)
    return TransformerConfig(**(fields | options))


def _expert_fields(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_ffn_size,
        # Softmax over a token's experts alone is that over all, made to add up to 1.
        "moe_router_pre_softmax": not shape.normalized_routing,
        "moe_router_score_function": "softmax",
        # Rewards decide where tokens go, unless moe_aux_loss_coeff asks for a balance, too.
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
    }


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns hidden states; the head runs on chosen tokens only.

    A response token needs logits, a prompt token does not, and a vocabulary row is long.

    Attributes:
        inverse_frequencies: float32 [head_dim / 2] of the rotary positions.
    """

    inverse_frequencies: torch.Tensor
    own_parameters: frozenset[str] = frozenset()
    """Parameters that a checkpoint of the family does not have."""
    partly_trained: bool = False
    """Some parameters, on this rank or another, are not trained."""

    def pack(self, cu_seqlens: torch.Tensor, positions: torch.Tensor, max_seqlen: int) -> Pack:
        """Describes a packed micro-batch to the layers.

        Args:
            cu_seqlens: int32 [sequences + 1], where each sequence starts.
            positions: int64 [tokens], starting at 0 in each sequence.
            max_seqlen: tokens of the longest sequence.
        """
        cos, sin = rotary_tables(self.inverse_frequencies, positions, self.config.params_dtype)
        return Pack(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            cos=cos,
            sin=sin,
        )

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states  # [s, b, hidden]; [s / tp, b, hidden] with sequence parallelism

    def hidden_rows(self, hidden_states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Picks tokens of a pack on the last stage.

        Args:
            hidden_states: what forward returned, [s (/ tp), 1, hidden].
            index: int64 [n], tokens of the pack.

        Returns:
            [n, hidden]
        """
        if self.config.sequence_parallel:
            # The head sums its input gradients over the ranks, so here they are only cut.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return hidden_states.squeeze(1).index_select(0, index)

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits of this tensor-parallel rank's part of the vocabulary.

        Args:
            rows: [n, hidden]

        Returns:
            [n, padded vocabulary / tensor-parallel size], in the model's dtype.
        """
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else None
        )
        logits, _ = self.output_layer(rows.unsqueeze(1), weight=weight)
        return logits.squeeze(1)


class ValueHead(torch.nn.Module):
    """One number a token, in float32; begins at 0, so a fresh critic predicts nothing."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        shape = (1, config.hidden_size)
        self.weight = torch.nn.Parameter(
            torch.zeros(shape, dtype=config.params_dtype, device=device)
        )
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> float32 [n]"""
        weight, bias = self.weight.float(), self.bias.float()
        return torch.nn.functional.linear(rows.float(), weight, bias).squeeze(-1)


class ValueModel(PolicyModel):
    """The same decoder with a value head instead of the vocabulary."""

    own_parameters = frozenset({"output_layer.weight", "output_layer.bias"})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **(options | {"share_embeddings_and_output_weights": False}))
        if self.post_process:
            self.output_layer = ValueHead(self.config)  # type: ignore[assignment]

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """Values. [n, hidden] -> float32 [n]"""
        return self.output_layer(rows)


def build_model(
    settings: TrainerSettings,
    shape: ModelShape,
    options: ResolvedOptions,
    kind: type[PolicyModel] = PolicyModel,
) -> tuple[list[PolicyModel], ModelShape]:
    """Builds this rank's part of the model and fills it with the checkpoint's weights.

    Args:
        kind: PolicyModel, or ValueModel for a critic.

    Returns:
        The chunks of this rank, one but in an interleaved pipeline, and the model's shape with the
        padded vocabulary.

    Raises:
        ConfigError: weights and config.json do not belong together, or the parallel sizes do not
            divide the model.
    """
    check_divisible(settings, shape, options.transformer)
    shape = replace(
        shape,
        padded_vocab_size=padded_vocab_size(
            shape.vocab_size,
            settings.make_vocab_size_divisible_by,
            settings.tensor_model_parallel_size,
        ),
    )
    config = transformer_config(settings, shape, options.transformer)
    frequencies = rotary_frequencies(settings.hf_checkpoint, shape)
    frequencies = frequencies.to(torch.cuda.current_device())
    stages = range(settings.virtual_stages) if settings.virtual_stages else (None,)
    chunks = [_build_chunk(kind, config, shape, frequencies, stage) for stage in stages]
    load_weights(chunks, shape, settings.hf_checkpoint)
    return chunks, shape


def _build_chunk(
    kind: type[PolicyModel],
    config: TransformerConfig,
    shape: ModelShape,
    frequencies: torch.Tensor,
    stage: int | None,
) -> PolicyModel:
    """The layers of one virtual stage of this rank; all of its layers where there is none."""
    chunk = kind(
        config,
        decoder_spec(config, stage),  # type: ignore[arg-type]
        vocab_size=shape.padded_vocab_size or shape.vocab_size,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none",  # PackedAttention turns queries and keys
        vp_stage=stage,
    )
    if chunk.post_process and config.sequence_parallel:
        # hidden_rows has gathered the sequence already.
        chunk.output_layer.sequence_parallel = False
    chunk.inverse_frequencies = frequencies
    return chunk


def local_entries(model: PolicyModel, shape: ModelShape) -> dict[str, BoundEntry]:
    """Parameter names of a chunk -> table entries. Canonical (checkpoint) order."""
    layers: Any = model.decoder.layers
    first_layer = layers[0].layer_number - 1 if layers else 0
    last_layer = first_layer + len(layers)
    experts = parallel.own_experts(shape.num_experts or 0)
    found = {}
    for entry in bind(shape):
        if entry.layer is not None:
            if not first_layer <= entry.layer < last_layer:
                continue
            local = f"decoder.layers.{entry.layer - first_layer}."
            name = entry.megatron.replace(f"decoder.layers.{entry.layer}.", local)
            if entry.expert is not None:
                if entry.expert not in experts:
                    continue
                name = name.replace(
                    f"local_experts.{entry.expert}.",
                    f"local_experts.{entry.expert - experts.start}.",
                )
            found[name] = entry
        elif (entry.place == "first" and model.pre_process) or (
            entry.place == "last" and model.post_process
        ):
            found[entry.megatron] = entry
        if entry.place == "first" and shape.tied and model.post_process and not model.pre_process:
            # The last stage of a tied model keeps a copy of the embedding as its head.
            found["output_layer.weight"] = entry
    return {name: entry for name, entry in found.items() if name not in model.own_parameters}


def select_trained(
    chunks: Sequence[PolicyModel], shape: ModelShape, settings: TrainerSettings
) -> None:
    """Keeps gradients and optimizer state away from parameters that are not to be trained. A
    collective.

    Raises:
        ConfigError: a pattern fits nothing, or a pipeline stage would train nothing.
    """
    only, frozen = settings.only_train_params_name_list, settings.freeze_params_name_list
    if not only and not frozen:
        return
    chosen = trained_names([entry.megatron for entry in bind(shape)], only, frozen)
    for chunk in chunks:
        chunk.partly_trained = True
        parameters = dict(chunk.named_parameters())
        for name, entry in local_entries(chunk, shape).items():
            parameters[name].requires_grad_(entry.megatron in chosen)
    trained = all(any(p.requires_grad for p in chunk.parameters()) for chunk in chunks)
    if not all(parallel.gather_objects(trained)):
        raise ConfigError(
            "only_train_params_name_list and freeze_params_name_list leave a pipeline stage "
            "without a parameter to train: use fewer stages, or train some of each"
        )


@torch.no_grad()
def load_weights(chunks: Sequence[PolicyModel], shape: ModelShape, checkpoint: str) -> None:
    """Copies the checkpoint's tensors into this rank's parameters.

    Raises:
        ConfigError: a tensor is missing, unexpected or of another shape.
    """
    with HFTensors(checkpoint) as tensors:
        _refuse_unknown(tensors, shape, checkpoint)
        for chunk in chunks:
            _load_chunk(chunk, shape, tensors)


def _load_chunk(chunk: PolicyModel, shape: ModelShape, tensors: HFTensors) -> None:
    entries = local_entries(chunk, shape)
    own = chunk.own_parameters
    parameters = {name: p for name, p in chunk.named_parameters() if name not in own}
    if set(parameters) != set(entries):
        odd = sorted(set(parameters) ^ set(entries))
        raise ConfigError(
            f"the table of {shape.model_type} and the model differ in {', '.join(odd[:3])}"
        )
    for name, parameter in parameters.items():
        entry = entries[name]
        parts = [tensors.read(hf_name) for hf_name in entry.hf_names]
        group = parallel.tensor_group(expert=entry.expert is not None)
        parameter.copy_(entry.to_megatron(parts, group.rank(), group.size()))
        if entry.layout.axis is not None and not hasattr(parameter, "tensor_model_parallel"):
            # Unmarked parameters count once per tensor-parallel group in the gradient norm.
            set_tensor_model_parallel_attributes(parameter, True, entry.layout.axis, 1)


def _refuse_unknown(tensors: HFTensors, shape: ModelShape, checkpoint: str) -> None:
    known = {name for entry in bind(shape) for name in entry.hf_names}
    if shape.tied:
        known.add("lm_head.weight")
    unknown = sorted(
        name for name in tensors.names - known if not name.endswith("rotary_emb.inv_freq")
    )
    if unknown:
        raise ConfigError(
            f"{checkpoint} holds {len(unknown)} tensors that a {shape.model_type} model with its "
            f"config.json has not, such as {unknown[0]!r}"
        )
