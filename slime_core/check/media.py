"""Media in prompts: who can look at them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from slime_core.check.findings import Findings
from slime_core.config.tree import RunConfig

VISION_KEYS = ("vision_config", "audio_config", "visual")


def check_media(config: RunConfig, findings: Findings, *, trains: bool) -> None:
    """Refuses what would train or ask a model about media it does not see."""
    keys = config.data.multimodal_keys
    folder = config.rollout.hf_checkpoint
    sees = sees_media(folder)
    if trains and sees and config.run.num_rollout > 0:
        findings.problem(
            f"hf_checkpoint {folder} is a vision model, which is not trained here yet (its vision "
            "part has no trainer): take a text model, or num_rollout 0 to evaluate it only"
        )
    own = config.rollout.custom_generate_function_path or config.rollout.rollout_function_path
    if keys and not sees and own is None:
        findings.problem(
            f"multimodal_keys puts {', '.join(keys)} into prompts, and hf_checkpoint {folder} is a "
            "text model: leave multimodal_keys out, or set custom_generate_function_path to a "
            "function that uses them"
        )


def sees_media(folder: str) -> bool:
    """Whether config.json describes a part for pictures, videos or sound."""
    with suppress(OSError, ValueError):
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return isinstance(config, dict) and any(key in config for key in VISION_KEYS)
    return False
