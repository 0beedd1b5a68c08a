"""The model's tokenizer, from local files."""

from __future__ import annotations

from typing import Any

from slime_core.errors import ConfigError


def load_tokenizer(hf_checkpoint: str) -> Any:
    """The model's tokenizer, from local files only.

    Raises:
        ConfigError: the folder has no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(hf_checkpoint, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"hf_checkpoint {hf_checkpoint}: the tokenizer cannot be loaded: {error}"
        ) from error
