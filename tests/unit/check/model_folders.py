"""Small and large model folders whose weights are headers over a hole in a file."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

from slime_core.weights.tables import bind, read_shape

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
MODEL = ROOT / "configs" / "quickstart" / "model"
TRAIN = ROOT / "configs" / "quickstart" / "train.jsonl"
BYTES = 2


def copy_of_the_model(folder: Path, **config: Any) -> Path:
    """The quickstart's model with other values in its config.json; None removes a key."""
    shutil.copytree(MODEL, folder)
    content = {**json.loads((MODEL / "config.json").read_text()), **config}
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def large_model(folder: Path) -> Path:
    """Qwen3-4B's dimensions; 8 GB of weights that take no room on the disk."""
    copy_of_the_model(
        folder, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        max_position_embeddings=40960, tie_word_embeddings=True, dtype="bfloat16",
        layer_types=None, rms_norm_eps=1e-6,
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
    )  # fmt: skip
    write_hollow(folder)
    return folder


def write_hollow(folder: Path) -> None:
    """Writes model.safetensors as config.json wants it: a true header and nothing behind it."""
    header, end = {}, 0
    for entry in bind(read_shape(folder)):
        for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True):
            start, end = end, end + math.prod(shape) * BYTES
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
