"""New weights for a served model: checked in full before the first parameter changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from slime_core.engines.embedded.errors import RefusedWeightsError
from slime_core.engines.embedded.model import ServedModel, load_module
from slime_core.engines.embedded.steady import FUSED_EXPERTS
from slime_core.errors import EngineError

log = logging.getLogger(__name__)


def load_from_disk(model: ServedModel, path: str) -> int:
    """Copies the weights of a model folder into the served model.

    Returns:
        Number of tensors.

    Raises:
        RefusedWeightsError: no safetensors there, damaged files, missing or foreign names, or
            other shapes; the served weights are unchanged.
    """
    own = places(model.module)
    files = _safetensors_files(Path(path))
    with ExitStack() as stack:
        sources = _open(files, stack)
        needed = _distinct(own)
        if needed - sources.keys() and _needs_conversion(own, sources):
            return _load_converted(model, path)
        missing = sorted(name for name in needed if not _present(name, own, sources))
        if missing:
            raise RefusedWeightsError(f"{path} lacks {len(missing)} weights, first {missing[0]}")
        foreign = sorted(sources.keys() - own.keys())
        if foreign:
            raise RefusedWeightsError(
                f"{path} has {len(foreign)} weights that the model does not, first {foreign[0]}"
            )
        for name, source in sources.items():
            _check_shape(name, source.get_slice(name).get_shape(), own[name])
        for name, source in sources.items():
            own[name].copy_(source.get_tensor(name))
    return len(sources)


def load_from_tensors(model: ServedModel, named: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Copies tensors under Hugging Face names; a part of the model is allowed.

    Returns:
        Number of tensors.

    Raises:
        RefusedWeightsError: a name or shape that the model does not have; nothing is changed.
    """
    own = places(model.module)
    pairs = list(named)
    for name, tensor in pairs:
        if name not in own:
            raise RefusedWeightsError(f"the model has no weight named {name!r}")
        _check_shape(name, list(tensor.shape), own[name])
    for name, tensor in pairs:
        own[name].copy_(tensor)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)  # the sender reuses its memory after the answer
    return len(pairs)


def places(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Where the tensor of each name belongs. transformers keeps the experts of a layer in one
    tensor; under the names that files and trainers use, each is a part of it."""
    fused = {name for name, part in module.named_modules() if type(part).__name__ == FUSED_EXPERTS}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict().items():
        owner, _, kind = name.rpartition(".")
        if owner not in fused:
            found[name] = tensor
        elif kind == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2, 0)
                found[f"{owner}.{expert}.gate_proj.weight"] = gate
                found[f"{owner}.{expert}.up_proj.weight"] = up
        else:
            for expert, down in enumerate(tensor):
                found[f"{owner}.{expert}.down_proj.weight"] = down
    return found


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise RefusedWeightsError(f"{index} cannot be read: {error!r}") from error
        return [folder / name for name in sorted(names)]
    if single.is_file():
        return [single]
    raise RefusedWeightsError(f"{folder} has neither {single.name} nor {index.name}")


def _open(files: list[Path], stack: ExitStack) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    sources: dict[str, Any] = {}
    for file in files:
        try:
            opened = stack.enter_context(safe_open(str(file), framework="pt"))
        except (OSError, SafetensorError) as error:
            raise RefusedWeightsError(f"{file} cannot be read: {error}") from error
        sources.update((name, opened) for name in opened.keys())  # noqa: SIM118
    return sources


def _distinct(own: Mapping[str, torch.Tensor]) -> set[str]:
    """One name for each tensor; tied weights stand in the state under several."""
    seen: dict[int, str] = {}
    for name, tensor in own.items():
        seen.setdefault(tensor.data_ptr(), name)
    return set(seen.values())


def _present(name: str, own: Mapping[str, torch.Tensor], sources: Mapping[str, Any]) -> bool:
    if name in sources:
        return True
    address = own[name].data_ptr()
    return any(other in sources and own[other].data_ptr() == address for other in own)


def _needs_conversion(own: Mapping[str, torch.Tensor], sources: Mapping[str, Any]) -> bool:
    """True when file and module names both differ: transformers fuses some weights on loading."""
    return bool(own.keys() - sources.keys()) and bool(sources.keys() - own.keys())


def _load_converted(model: ServedModel, path: str) -> int:
    """Loads through transformers, for architectures whose files are laid out in another way."""
    try:
        fresh = load_module(path, model.config, str(model.dtype).removeprefix("torch."))
    except EngineError as error:
        raise RefusedWeightsError(str(error)) from error
    return load_from_tensors(model, places(fresh).items())


def _check_shape(name: str, shape: list[int], own: torch.Tensor) -> None:
    if list(shape) != list(own.shape):
        raise RefusedWeightsError(
            f"weight {name} has shape {list(shape)}, the model needs {list(own.shape)}"
        )
