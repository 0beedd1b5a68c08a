"""From a row's prompt to the text a model sees: messages, tools, media, chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import DataError
from slime_core.untrusted_json import read_json

Message = dict[str, Any]
MEDIA = {"image": "<image>", "video": "<video>", "audio": "<audio>"}


def prompt_to_messages(prompt: Any) -> list[Message]:
    """A prompt as chat history: a string is one user message, messages are copied.

    Raises:
        DataError: it is neither, or a message lacks `role`.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, (list, tuple)):
        raise DataError(f"a prompt is text or a list of messages, not {type(prompt).__name__}")
    messages = [dict(item) if isinstance(item, Mapping) else item for item in prompt]
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"message {number} of the prompt needs `role` and `content`")
    return messages


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """Tool descriptions from a row: a list or its JSON text; None and "" stand for none.

    Raises:
        DataError: it is not a list of objects.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str) and value.strip():
        try:
            value = read_json(value)
        except ValueError as error:
            raise DataError(f"tools are not valid JSON: {error}") from error
    if not value:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) for item in value):
        raise DataError("tools must be a list of objects (a JSON schema each)")
    return [dict(item) for item in value]


def media_items(value: Any) -> list[Any]:
    """The media of a row: a list as it is, a single one as a list of it, none as an empty one."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def place_media(messages: Sequence[Message], media: Mapping[str, Sequence[Any]]) -> list[Message]:
    """Puts media where messages say `<image>`, `<video>` or `<audio>`.

    Args:
        messages: chat history with text contents.
        media: kind -> items in the order of their placeholders.

    Returns:
        Messages whose content is a list of typed items, where they hold a placeholder.

    Raises:
        DataError: placeholders and items do not match in number, or a kind is unknown.
    """
    unknown = sorted(set(media) - set(MEDIA))
    if unknown:
        raise DataError(f"unknown kind of media {unknown[0]!r}; known: {', '.join(MEDIA)}")
    waiting = {MEDIA[kind]: (kind, list(items)) for kind, items in media.items()}
    if not waiting:
        return list(messages)
    pattern = re.compile("(" + "|".join(re.escape(mark) for mark in waiting) + ")")
    placed = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and pattern.search(content):
            parts = [part for part in pattern.split(content) if part]
            message = {**message, "content": [_content_item(part, waiting) for part in parts]}
        placed.append(message)
    for mark, (kind, items) in waiting.items():
        if items:
            raise DataError(f"{len(items)} {kind} items have no {mark} in the prompt")
    return placed


def _content_item(part: str, waiting: dict[str, tuple[str, list[Any]]]) -> dict[str, Any]:
    if part not in waiting:
        return {"type": "text", "text": part}
    kind, items = waiting[part]
    if not items:
        raise DataError(f"the prompt has more {part} than there are {kind} items")
    return {"type": kind, kind: items.pop(0)}


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Text of a chat history through the tokenizer's chat template.

    Raises:
        DataError: the tokenizer has no template, or the template refuses the messages.
    """
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the tokenizer has no chat template; drop --apply-chat-template or add one to the model"
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            tools=list(tools) if tools else None,
            **(template_kwargs or {}),
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise DataError(
            f"the chat template refused the messages: {type(error).__name__}: {error}"
        ) from error


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a rendered prompt; special tokens come from the text, none are added."""
    return list(tokenizer.encode(text, add_special_tokens=False))
