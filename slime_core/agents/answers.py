"""Answers in the shapes of OpenAI's chat completions, whole and as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

PIECES = 16
"""A streamed answer comes in about so many pieces of text."""


@dataclass(frozen=True)
class Answer:
    """One recorded turn.

    Attributes:
        id: names it.
        created_s: Unix time.
        model: what the client called the model.
        message: the assistant's message, arguments of calls as JSON text.
        finish_reason: stop, length or tool_calls.
        prompt_tokens: tokens before the answer; `tokens`: the answer's own.
        log_probs: (text, log-prob) of each token of the answer.
    """

    id: str
    created_s: int
    model: str
    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    tokens: int
    log_probs: list[tuple[str, float]] = field(default_factory=list)

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self.prompt_tokens + self.tokens,
        }


def completion(answer: Answer, log_probs: bool) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choice = {
        "index": 0,
        "message": answer.message,
        "finish_reason": answer.finish_reason,
        "logprobs": _log_probs(answer) if log_probs else None,
    }
    head = _head(answer, "chat.completion")
    return {**head, "choices": [choice], "usage": answer.usage}


def events(answer: Answer, log_probs: bool, include_usage: bool) -> Iterator[bytes]:
    """The same as server-sent events, `[DONE]` at their end."""
    head = _head(answer, "chat.completion.chunk")
    told = _log_probs(answer) if log_probs else None
    for delta in _deltas(answer.message):
        choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": told}
        told = None  # with the first piece
        yield event({**head, "choices": [choice]})
    last = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason, "logprobs": None}
    yield event({**head, "choices": [last]})
    if include_usage:
        yield event({**head, "choices": [], "usage": answer.usage})
    yield b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


def tool_calls(calls: list[tuple[str, dict[str, Any]]], prefix: str) -> list[dict[str, Any]]:
    """Calls as a message carries them, with ids that a repeated rollout gives again."""
    return [
        {
            "id": f"{prefix}_{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for i, (name, arguments) in enumerate(calls)
    ]


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created_s, "model": answer.model}


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    text = message["content"] or ""
    size = max(1, -(-len(text) // PIECES))
    for start in range(0, len(text), size):
        yield {"content": text[start : start + size]}
    for index, call in enumerate(message.get("tool_calls") or []):
        yield {"tool_calls": [{"index": index, **call}]}


def _log_probs(answer: Answer) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in answer.log_probs
    ]
    return {"content": content, "refusal": None}
