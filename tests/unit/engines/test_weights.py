"""Weight updates: exact when they fit, refused without a trace when they do not."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_core.engines.embedded.errors import RefusedWeightsError
from slime_core.engines.embedded.model import ServedModel
from slime_core.engines.embedded.weights import load_from_disk, load_from_tensors
from slime_core.errors import EngineError


@pytest.fixture
def state(model_path):
    return load_file(str(model_path / "model.safetensors"))


@pytest.fixture
def changed(state):
    return {name: tensor + 0.01 for name, tensor in state.items()}


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


def assert_served(model, expected) -> None:
    served = model.module.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(served[name], tensor), name
    assert torch.equal(served["lm_head.weight"], served["model.embed_tokens.weight"])


def test_from_one_file(private_model, changed, tmp_path):
    save_file(changed, tmp_path / "model.safetensors")
    assert load_from_disk(private_model, str(tmp_path)) == len(changed)
    assert_served(private_model, changed)


def test_from_several_files_with_an_index(private_model, changed, tmp_path):
    names = sorted(changed)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, part in parts.items():
        save_file({name: changed[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    load_from_disk(private_model, str(tmp_path))
    assert_served(private_model, changed)


def test_other_dtypes_are_converted(private_model, changed, tmp_path):
    half = {name: tensor.bfloat16() for name, tensor in changed.items()}
    save_file(half, tmp_path / "model.safetensors")
    load_from_disk(private_model, str(tmp_path))
    assert_served(private_model, {name: tensor.float() for name, tensor in half.items()})


def test_tensors_in_parts(private_model, changed):
    pairs = list(changed.items())
    assert load_from_tensors(private_model, pairs[:5]) == 5
    load_from_tensors(private_model, pairs[5:])
    assert_served(private_model, changed)


def write_missing(changed, folder):
    changed.pop("model.norm.weight")
    save_file(changed, folder / "model.safetensors")


def write_foreign(changed, folder):
    save_file(changed | {"extra.weight": torch.zeros(2)}, folder / "model.safetensors")


def write_shape(changed, folder):
    changed["model.norm.weight"] = torch.zeros(7)
    save_file(changed, folder / "model.safetensors")


def write_truncated(changed, folder):
    save_file(changed, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def write_bad_index(changed, folder):
    (folder / "model.safetensors.index.json").write_text("{")


def write_nothing(changed, folder):
    pass


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (write_missing, "lacks 1 weights, first model.norm.weight"),
        (write_foreign, "1 weights that the model does not, first extra.weight"),
        (write_shape, r"model.norm.weight has shape \[7\], the model needs \[96\]"),
        (write_truncated, "cannot be read"),
        (write_bad_index, "cannot be read"),
        (write_nothing, "has neither model.safetensors nor"),
    ],
)
def test_refused_files_change_nothing(private_model, changed, tmp_path, write, says):
    before = weights_of(private_model)
    write(changed, tmp_path)
    with pytest.raises(RefusedWeightsError, match=says):
        load_from_disk(private_model, str(tmp_path))
    assert_served(private_model, before)


def test_refused_tensors_change_nothing(private_model, changed):
    before = weights_of(private_model)
    good = next(iter(changed.items()))
    with pytest.raises(RefusedWeightsError, match="no weight named 'nope'"):
        load_from_tensors(private_model, [good, ("nope", torch.zeros(1))])
    with pytest.raises(RefusedWeightsError, match="has shape"):
        load_from_tensors(private_model, [good, ("model.norm.weight", torch.zeros(1))])
    assert_served(private_model, before)


def model_folder(model_path, folder, **changes):
    config = json.loads((model_path / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 48}, "cannot be loaded"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "lacks 11 weights"),
        ({"model_type": "no_such_family"}, "cannot be loaded"),
    ],
)
def test_models_that_do_not_fit_are_refused(model_path, tmp_path, state, changes, says):
    folder = model_folder(model_path, tmp_path, **changes)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=says):
        ServedModel(str(folder))


def test_folders_that_hold_no_model_are_refused(tmp_path):
    with pytest.raises(EngineError, match=r"config.json does not exist; --model-path must be"):
        ServedModel(str(tmp_path))
    (tmp_path / "config.json").write_text("{nonsense")
    with pytest.raises(EngineError, match="cannot be read"):
        ServedModel(str(tmp_path))


@pytest.mark.parametrize("kind", ["Qwen2", "Llama", "Mistral"])
def test_other_families_are_served_exactly(tmp_path, kind, new_scheduler, new_request):
    """Random models of other families: greedy output and log-probs equal a plain forward."""
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=kind == "Qwen2",
    )
    whole = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    whole.save_pretrained(tmp_path)
    model = ServedModel(str(tmp_path))
    request = new_request([5, 6, 7, 8], 20, temperature=0.0, ignore_eos=True)
    scheduler = new_scheduler(model, deterministic=True)
    scheduler.submit([request])
    while not scheduler.idle:
        scheduler.step()
    with torch.inference_mode():
        full = torch.log_softmax(whole(input_ids=torch.tensor([request.tokens])).logits[0], -1)
    picked = full[3:-1]
    assert request.output == picked.argmax(-1).tolist()
    assert torch.tensor(request.log_probs) == pytest.approx(picked.max(-1).values, abs=1e-5)


def test_bfloat16_is_served_like_a_plain_forward(model_path, new_scheduler, new_request):
    model = ServedModel(str(model_path), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    request = new_request([24, 21, 27, 20, 34], 30, ignore_eos=True)
    scheduler = new_scheduler(model)
    scheduler.submit([request])
    while not scheduler.idle:
        scheduler.step()
    with torch.inference_mode():
        logits = model.module(input_ids=torch.tensor([request.tokens])).logits[0].float()
    tokens = torch.tensor(request.output)
    expected = torch.log_softmax(logits, -1)[4:-1].gather(-1, tokens[:, None])[:, 0]
    assert torch.tensor(request.log_probs) == pytest.approx(expected, abs=0.15)
