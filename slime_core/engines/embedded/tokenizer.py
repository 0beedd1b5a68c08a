"""Text to token ids and back, with the tokenizers library alone when that is enough."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from slime_core.errors import EngineError


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str: ...

    def token_id(self, token: str) -> int | None: ...


class FastTokenizer:
    """tokenizer.json through the tokenizers library: no transformers import."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer as Rust

        try:
            self._rust = Rust.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for a damaged file
            raise EngineError(f"{file} cannot be read as a tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        return self._rust.encode(text).ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return self._rust.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._rust.token_to_id(token)


class SlowTokenizer:
    """Any other tokenizer, through transformers."""

    def __init__(self, path: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._inner: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise EngineError(f"no tokenizer can be loaded from {path}: {error}") from error

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return self._inner.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._inner.get_vocab().get(token)


def load_tokenizer(path: str) -> Tokenizer:
    """Loads the tokenizer of a model folder.

    Raises:
        EngineError: there is none, or it is damaged.
    """
    file = Path(path) / "tokenizer.json"
    return FastTokenizer(file) if file.is_file() else SlowTokenizer(path)


def end_token_ids(model_path: str, tokenizer_path: str, tokenizer: Tokenizer) -> frozenset[int]:
    """End tokens that the model's config, its generation config or the tokenizer name."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _read_json(Path(model_path) / name).get("eos_token_id")
        ids.update([value] if isinstance(value, int) else value or ())
    token = _read_json(Path(tokenizer_path) / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    own = tokenizer.token_id(token) if isinstance(token, str) else None
    return frozenset(ids if own is None else ids | {own})


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"{file} cannot be read: {error}") from error
