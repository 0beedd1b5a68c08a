"""Reading safetensors folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime_core.errors import ConfigError
from slime_core.weights.hf_files import INDEX, SINGLE, HFTensors


def test_one_file(tmp_path: Path) -> None:
    save_file({"a": torch.arange(3.0)}, tmp_path / SINGLE)
    with HFTensors(tmp_path) as tensors:
        assert tensors.names == {"a"}
        assert tensors.read("a").tolist() == [0, 1, 2]


def test_several_files_by_their_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "y.safetensors")
    weight_map = {"a": "x.safetensors", "b": "y.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with HFTensors(tmp_path) as tensors:
        assert tensors.names == {"a", "b"}
        assert tensors.read("b").item() == 1


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / SINGLE)
    with HFTensors(tmp_path) as tensors, pytest.raises(ConfigError, match="no tensor 'b'"):
        tensors.read("b")


def test_damaged_or_absent_files_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only safetensors are read"):
        HFTensors(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"not a safetensors file at all")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        HFTensors(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(ConfigError, match="not a safetensors index"):
        HFTensors(tmp_path)
