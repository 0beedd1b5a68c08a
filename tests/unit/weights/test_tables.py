"""The tables against transformers' own models, and as inverses of themselves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from slime_core.engines.embedded.weights import places
from slime_core.errors import ConfigError
from slime_core.weights.tables import TABLES, ModelShape, bind, padded_vocab_size, table_for
from slime_core.weights.tables.layouts import GATE_UP, QKV, VOCABULARY

EXPERTS = {"num_experts": 3, "experts_per_token": 2, "expert_ffn_size": 12}


def shape_of(family: str, **changes: object) -> ModelShape:
    base = ModelShape(
        model_type=family,
        num_layers=2,
        hidden_size=16,
        ffn_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=50,
        padded_vocab_size=64,
        max_positions=64,
        norm_eps=1e-6,
        tied=False,
        rope_theta=1e4,
        **(EXPERTS if family == "qwen3_moe" else {}),  # type: ignore[arg-type]
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def random_hf_tensors(shape: ModelShape, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(size, generator=generator)
        for entry in bind(shape)
        for name, size in zip(entry.hf_names, entry.hf_shapes, strict=True)
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(TABLES))
def test_names_and_shapes_are_those_of_transformers(family: str, tied: bool) -> None:
    shape = shape_of(family, tied=tied)
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    config = AutoConfig.for_model(
        family,
        **(experts if family == "qwen3_moe" else {}),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=50,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(place.shape) for name, place in places(model).items()}
    if tied:
        theirs.pop("lm_head.weight")
    ours = {
        name: size
        for entry in bind(shape)
        for name, size in zip(entry.hf_names, entry.hf_shapes, strict=True)
    }
    assert ours == theirs


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(TABLES))
def test_loading_and_export_are_inverse(family: str, tied: bool, size: int) -> None:
    shape = shape_of(family, tied=tied)
    tensors = random_hf_tensors(shape)
    back: dict[str, torch.Tensor] = {}
    for entry in bind(shape):
        parts = [tensors[name] for name in entry.hf_names]
        shards = [entry.to_megatron(parts, rank, size) for rank in range(size)]
        back.update(entry.to_hf(shards))
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor), name


@settings(max_examples=50, deadline=None)
@given(
    family=st.sampled_from(sorted(TABLES)),
    size=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 3),
    per_group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 6]),
    vocab=st.integers(3, 40),
)
def test_inverse_for_any_heads_vocabulary_and_cut(
    family: str, size: int, groups: int, per_group: int, head_dim: int, vocab: int
) -> None:
    kv_heads = groups * size
    shape = shape_of(
        family,
        num_layers=1,
        num_heads=kv_heads * per_group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=4 * size,
        vocab_size=vocab,
        padded_vocab_size=padded_vocab_size(vocab, 8, size),
    )
    tensors = random_hf_tensors(shape)
    for entry in bind(shape):
        parts = [tensors[name] for name in entry.hf_names]
        shards = [entry.to_megatron(parts, rank, size) for rank in range(size)]
        for name, tensor in entry.to_hf(shards):
            assert torch.equal(tensor, tensors[name]), name


def test_query_key_value_rows_alternate_by_group() -> None:
    shape = shape_of("llama", num_heads=4, num_kv_heads=2, head_dim=1)
    q, k, v = (torch.tensor(x)[:, None] for x in ([0, 1, 2, 3], [10, 11], [20, 21]))
    joined = QKV.join([q, k, v], shape)
    assert joined.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_each_rank_gets_its_part_of_gate_and_of_up() -> None:
    gate, up = torch.arange(4.0)[:, None], torch.arange(10.0, 14)[:, None]
    whole = GATE_UP.join([gate, up], shape_of("llama"))
    assert GATE_UP.shard(whole, 1, 2).flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_padding_is_zero_and_cut_off_again() -> None:
    shape = shape_of("llama", vocab_size=3, padded_vocab_size=8)
    rows = torch.ones(3, 2)
    padded = VOCABULARY.join([rows], shape)
    assert padded.shape == (8, 2)
    assert padded[3:].abs().sum() == 0
    assert torch.equal(VOCABULARY.split(padded, shape)[0], rows)


def test_padding_does_not_change_with_the_tensor_parallel_size() -> None:
    assert {padded_vocab_size(100, 128, size) for size in (1, 2, 4, 8)} == {128}
    assert padded_vocab_size(128, 128, 1) == 128
    assert padded_vocab_size(129, 128, 1) == 256
    assert padded_vocab_size(100, 1, 8) == 104


def test_a_tensor_that_does_not_fit_is_named() -> None:
    entry = bind(shape_of("qwen3"))[0]
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight has shape \[2, 16\]"):
        entry.to_megatron([torch.zeros(2, 16)])


def test_an_unknown_family_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'qwen3'"):
        table_for("qwen33")
