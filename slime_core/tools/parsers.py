"""Tool calls in the text of a response, in the formats of the model families."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from slime_core.tools.interface import ToolCall
from slime_core.untrusted_json import read_json

HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)
LLAMA = re.compile(r"^\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*(?:<\|eo[mt]_id\|>)?\s*$", re.DOTALL)


def parse_calls(text: str, family: str = "auto") -> list[ToolCall]:
    """The calls of a response, in order.

    Args:
        family: one of FAMILIES; auto takes the first format that is found in the text.
    """
    parsers = PARSERS.values() if family == "auto" else [PARSERS[family]]
    for parser in parsers:
        calls = parser(text)
        if calls:
            return calls
    return []


def split_calls(text: str, family: str = "auto") -> tuple[str, list[ToolCall]]:
    """What a response says besides its calls, and its calls."""
    calls = parse_calls(text, family)
    if not calls:
        return text, []
    if LLAMA.match(text) and not HERMES.search(text):
        return "", calls
    return MISTRAL.sub("", HERMES.sub("", text)).strip(), calls


def _hermes(text: str) -> list[ToolCall]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen, Hermes)."""
    found = []
    for body in HERMES.findall(text):
        if not body.startswith("{"):
            continue
        found.append(_from_json(body))
    return found


def _glm(text: str) -> list[ToolCall]:
    """`<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>` (GLM 4.5)."""
    found = []
    for body in HERMES.findall(text):
        if body.startswith("{"):
            continue
        name = re.split(r"\s|<", body, maxsplit=1)[0]
        pairs = GLM_ARGUMENT.findall(body)
        found.append(ToolCall(name, {key.strip(): _loose(value) for key, value in pairs}))
    return found


def _mistral(text: str) -> list[ToolCall]:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`."""
    match = MISTRAL.search(text)
    try:
        items = read_json(match.group(1)) if match else []
    except ValueError:
        return [ToolCall("", None)]
    return [_from_value(item) for item in items]


def _llama(text: str) -> list[ToolCall]:
    """The whole response is `{"name": ..., "parameters": {...}}` (Llama 3)."""
    match = LLAMA.match(text)
    if not match:
        return []
    try:
        value = read_json(match.group(1))
    except ValueError:
        return []
    known = isinstance(value, dict) and "name" in value
    return [_from_value(value)] if known and {"parameters", "arguments"} & set(value) else []


PARSERS: dict[str, Callable[[str], list[ToolCall]]] = {
    "hermes": _hermes,
    "glm": _glm,
    "mistral": _mistral,
    "llama": _llama,
}
FAMILIES = ("auto", *PARSERS)


def _from_json(text: str) -> ToolCall:
    try:
        return _from_value(read_json(text))
    except ValueError:
        return ToolCall("", None)


def _from_value(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        return ToolCall("", None)
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _loose(arguments)
    name = str(value.get("name", ""))
    return ToolCall(name, arguments if isinstance(arguments, dict) else None)


def _loose(text: str) -> Any:
    """JSON where it is JSON, otherwise the text."""
    try:
        return read_json(text)
    except ValueError:
        return text.strip()
