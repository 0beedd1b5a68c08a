"""The model's tokenizer and chat template without transformers, whose import takes seconds.

It speaks as much of a transformers tokenizer as rendering a prompt needs.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from slime_core.check.findings import Findings
from slime_core.errors import ConfigError

FAST = "tokenizer.json"
OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class CheckTokenizer:
    """A `tokenizer.json` with the chat template that lies beside it.

    Raises:
        ConfigError: the file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(folder / FAST))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                f"{folder / FAST} is not a tokenizer ({error}): download it again"
            ) from error
        self._settings = _settings(folder / "tokenizer_config.json")
        self.chat_template = _template(folder, self._settings)

    @property
    def size(self) -> int:
        """Tokens that it can give, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool, **variables: Any
    ) -> str:
        """The text of a chat history, as transformers renders it."""
        assert not tokenize
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        special = {name: _text(self._settings.get(name)) for name in SPECIAL}
        given = {name: value for name, value in special.items() if value is not None}
        template = environment.from_string(self.chat_template or "")
        return template.render(messages=messages, **{**given, **variables})


def open_tokenizer(folder: str, findings: Findings) -> CheckTokenizer | None:
    """The tokenizer of a model folder; None where it is missing, or only transformers reads it."""
    path = Path(folder)
    if not path.is_dir():
        return None
    if (path / FAST).is_file():
        return findings.attempt(lambda: CheckTokenizer(path))
    if any((path / name).is_file() for name in OTHERS):
        findings.notes.append(f"{folder} has no {FAST}, so prompts are rendered by the run only")
        return None
    findings.problem(
        f"hf_checkpoint {folder} has no tokenizer: {FAST} (and tokenizer_config.json) must lie "
        "beside config.json; copy them from the model"
    )
    return None


def _settings(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: download it again") from error
    return content if isinstance(content, dict) else {}


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read as text: download it again") from error
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in found}
        return named.get("default")
    return found


def _text(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own, it does not escape what HTML would."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
