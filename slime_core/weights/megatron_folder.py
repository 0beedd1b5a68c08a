"""Where in a folder of Megatron's the newest checkpoint lies."""

from __future__ import annotations

from pathlib import Path

from slime_core.errors import ConfigError

MARK = "latest_checkpointed_iteration.txt"
RELEASE = "release"


def is_megatron(folder: Path) -> bool:
    """Whether Megatron-LM or slime saved checkpoints there."""
    return (folder / MARK).is_file()


def iteration_folder(folder: Path) -> Path:
    """The folder of the newest iteration; a folder of one iteration is taken as it is.

    Raises:
        ConfigError: the mark does not lead to a checkpoint.
    """
    if not is_megatron(folder):
        return folder
    text = (folder / MARK).read_text(encoding="utf-8", errors="replace").strip()
    if text != RELEASE and not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{folder / MARK} must hold an iteration or {RELEASE!r}, not {text!r}")
    found = folder / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not (found / "metadata.json").is_file():
        raise ConfigError(
            f"{folder / MARK} names {text}, but {found} is no torch_dist checkpoint "
            "(metadata.json is missing)"
        )
    return found
