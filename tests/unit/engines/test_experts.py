"""A model with experts in the embedded engine: transformers' numbers, and names of weights."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime_core.engines.embedded.answers import answer
from slime_core.engines.embedded.errors import RefusedWeightsError
from slime_core.engines.embedded.model import ServedModel
from slime_core.engines.embedded.scheduler import Limits, Scheduler
from slime_core.engines.embedded.stopping import StopRules
from slime_core.engines.embedded.weights import load_from_disk, load_from_tensors, places
from slime_core.errors import EngineError
from slime_core.sample import Sample
from tests.integration.megatron.models import save_random_model

VOCAB = 150


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    base = tmp_path_factory.mktemp("experts")
    own = save_random_model(base / "m", "qwen3_moe", False)
    return own, save_random_model(base / "other", "qwen3_moe", False, initializer_range=0.1)


def file_of(folder: str) -> dict[str, torch.Tensor]:
    return load_file(f"{folder}/model.safetensors")


@torch.inference_mode()
def logits(model: ServedModel, rows: list[list[int]]) -> list[torch.Tensor]:
    width = max(map(len, rows))
    hidden, _ = model.prefill(rows, width)
    return [model.logits(hidden[at, : len(row)]) for at, row in enumerate(rows)]


def random_rows(count: int) -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(3, VOCAB, (length,)).tolist() for length in range(5, 5 + count)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_are_those_of_transformers(folders, deterministic):
    served = ServedModel(folders[0], deterministic=deterministic)
    plain = AutoModelForCausalLM.from_pretrained(
        folders[0], dtype=torch.float32, experts_implementation="eager"
    )
    rows = random_rows(9)
    for row, found in zip(rows, logits(served, rows), strict=True):
        with torch.no_grad():
            wanted = plain(torch.tensor([row])).logits[0]
        assert wanted.abs().max() > 1
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_a_row_has_the_same_bits_in_every_crowd(folders):
    served = ServedModel(folders[0], deterministic=True)
    rows = [row[:5] * 3 for row in random_rows(40)]
    crowd = logits(served, rows)
    for at in (0, 17, 39):
        assert torch.equal(logits(served, [rows[at]] * 8)[0], crowd[at])


class Routers:
    """What plain transformers chooses for a sequence, [tokens, layers, k]."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager"
        )
        self.found: list[torch.Tensor] = []
        for name, gate in self.model.named_modules():
            if name.endswith("mlp.gate"):
                gate.register_forward_hook(lambda _, __, out: self.found.append(out[2]))

    @torch.no_grad()
    def of(self, tokens: list[int]) -> np.ndarray:
        self.found.clear()
        self.model(torch.tensor([tokens]))
        return torch.stack(self.found, 1).numpy()


@pytest.mark.parametrize("deterministic", [False, True])
def test_answers_tell_the_experts_of_all_tokens_but_the_last(
    folders, deterministic, new_request, tokenizer
):
    """Of prompts that share a prefill, sampled tokens, and rows that start again."""
    served = ServedModel(folders[0], deterministic=deterministic, routes=True)
    scheduler = Scheduler(
        served, StopRules(frozenset(), tokenizer.decode), Limits(deterministic=deterministic)
    )
    prompts = random_rows(3)
    requests = [new_request(one, limit=6) for one in (*prompts, prompts[0])]
    for start, request in zip((0, 2, None, 5), requests, strict=True):
        request.routes_from = start
    scheduler.submit(requests)
    for _ in range(3):
        scheduler.step()
    scheduler.retract()
    while not scheduler.idle:
        scheduler.step()
    plain = Routers(folders[0])
    for request in requests:
        meta = answer(request, len(request.output), tokenizer.decode)["meta_info"]
        if request.routes_from is None:
            assert "routed_experts" not in meta and not request.routes
            continue
        sample = Sample(tokens=request.prompt)
        if request.routes_from:
            sample.rollout_routed_experts = plain.of(request.prompt)[: request.routes_from]
        sample.append_response_tokens(
            SimpleNamespace(num_layers=3, moe_router_topk=2), tokens=request.output,
            log_probs=request.log_probs,
            meta_info=meta | {"routed_experts_start_len": request.routes_from},
        )  # fmt: skip
        assert len(request.output) == 6
        assert (sample.rollout_routed_experts == plain.of(request.tokens)[:-1]).all()


def test_a_model_without_experts_has_no_routes(model_path):
    with pytest.raises(EngineError, match=r"Qwen3ForCausalLM has no routers .* leave the option"):
        ServedModel(str(model_path), routes=True)


@pytest.mark.parametrize("route", ["disk", "tensors"])
def test_new_weights_by_the_names_of_files(folders, route):
    served, wanted = ServedModel(folders[0]), file_of(folders[1])
    if route == "disk":
        assert load_from_disk(served, folders[1]) == len(wanted)
    else:
        names = sorted(wanted)
        for part in (names[::2], names[1::2]):
            load_from_tensors(served, [(name, wanted[name]) for name in part])
    held = places(served.module)
    assert held.keys() == wanted.keys()
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)
    rows = random_rows(3)
    for a, b in zip(logits(served, rows), logits(ServedModel(folders[1]), rows), strict=True):
        assert torch.equal(a, b)


def test_a_tensor_of_another_model_is_refused(folders):
    served, wanted = ServedModel(folders[0]), file_of(folders[1])
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    with pytest.raises(RefusedWeightsError, match=f"weight {name} has shape"):
        load_from_tensors(served, [(name, wanted[name][:1])])
    with pytest.raises(RefusedWeightsError, match="no weight named"):
        load_from_tensors(served, [(name.replace(".3.", ".4."), wanted[name])])
    held = places(served.module)
    assert torch.equal(held[name], file_of(folders[0])[name])
