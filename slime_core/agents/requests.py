"""Requests to /v1/chat/completions: what is read, what the run decides itself, what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_core.agents.errors import ApiError, refused
from slime_core.refs import digest_of
from slime_core.untrusted_json import read_json

Message = dict[str, Any]
READ = ("model", "messages", "tools", "tool_choice", "stream", "stream_options", "stop", "n",
        "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs",
        "response_format")  # fmt: skip
OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
              "frequency_penalty", "repetition_penalty", "logit_bias",
              "chat_template_kwargs")  # fmt: skip
"""Sampling belongs to the run, since the trainer computes with its settings."""
WITHOUT_MEANING = ("user", "metadata", "store", "service_tier", "parallel_tool_calls",
                   "prompt_cache_key", "safety_identifier", "reasoning_effort", "verbosity",
                   "skip_special_tokens")  # fmt: skip
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class ChatRequest:
    """A request as the gateway understands it.

    Attributes:
        messages: plain messages as chat templates take them; contents are text.
        tools: offered to the model.
        max_tokens: most tokens of this answer, None for what the run allows.
        stop: strings that end this answer besides the run's own.
        logprobs: the client wants the log-probs of the answer's tokens.
        stream: it wants server-sent events; `include_usage`: with the counts at their end.
        of_the_run: what was asked for though the run decides it.
    """

    messages: list[Message]
    tools: list[Message] = field(default_factory=list)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    of_the_run: dict[str, Any] = field(default_factory=dict)

    def keys(self) -> list[str]:
        """One name for each message; equal messages have equal names."""
        return [message_key(message) for message in self.messages]

    def digest(self) -> str:
        """Names what is asked: conversation, tools and limits."""
        return digest_of([self.keys(), self.tools, self.max_tokens, list(self.stop)])


def parse_request(body: Any) -> ChatRequest:
    """Reads the body of a request.

    Raises:
        ApiError: it is malformed, or asks for what the gateway cannot do.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    unknown = [name for name in body if name not in (*READ, *OF_THE_RUN, *WITHOUT_MEANING)]
    if unknown:
        raise ApiError(400, f"unknown field {unknown[0]!r}", code="unknown_parameter",
                       param=unknown[0])  # fmt: skip
    _refuse_what_is_not_there(body)
    options = body.get("stream_options") or {}
    return ChatRequest(
        messages=_messages(body.get("messages")),
        tools=[] if body.get("tool_choice") == "none" else _tools(body.get("tools")),
        max_tokens=_limit(body),
        stop=_stop(body.get("stop")),
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        of_the_run={name: body[name] for name in OF_THE_RUN if body.get(name) is not None},
    )


def message_key(message: Mapping[str, Any]) -> str:
    """Names a message by role, text and calls; white space around an answer does not count, and
    neither do the ids of its calls."""
    text, calls = message.get("content") or "", message.get("tool_calls") or []
    if message["role"] == "assistant":
        text = text.strip()
    said = [[call["function"]["name"], call["function"]["arguments"]] for call in calls]
    return digest_of([message["role"], text, said, message.get("tool_call_id")])


def plain_message(message: Any, place: str = "messages") -> Message:
    """A message with text as content and arguments as objects.

    Raises:
        ApiError: it is none.
    """
    if not isinstance(message, Mapping):
        raise refused(place, f"{place} must be an object")
    role = {"developer": "system"}.get(str(message.get("role")), message.get("role"))
    if role not in ROLES:
        raise refused(place, f"{place}: role must be one of {', '.join(ROLES)}, not {role!r}")
    plain: Message = {"role": role, "content": _text(message.get("content"), place)}
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise refused(place, f"{place}: tool_calls must be a list")
        plain["tool_calls"] = [_call(call, place) for call in message["tool_calls"]]
    for name in ("tool_call_id", "name"):
        if message.get(name):
            plain[name] = str(message[name])
    return plain


def _refuse_what_is_not_there(body: Mapping[str, Any]) -> None:
    if body.get("n") not in (None, 1):
        raise refused("n", "one answer a request: send it again for another (it becomes a branch)")
    if body.get("top_logprobs"):
        raise refused("top_logprobs", "only the log-probs of the sampled tokens are there")
    form = body.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise refused("response_format", "answers are sampled freely: only {'type': 'text'}")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise refused("tool_choice", "the model chooses freely: only auto and none")


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise refused("messages", "messages must be a list that is not empty")
    found = [plain_message(one, f"messages[{i}]") for i, one in enumerate(value)]
    if found[-1]["role"] == "assistant":
        raise refused("messages", "the last message must not be the assistant's own")
    return found


def _text(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise refused(place, f"{place}: content must be text or a list of text parts")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise refused(place, f"{place}: only text parts can be served, not {kind!r}")
    return "".join(str(part.get("text", "")) for part in content)


def _call(call: Any, place: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refused(place, f"{place}: each of tool_calls needs function.name")
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # else the model sees what was written
            arguments = read_json(arguments or "{}")
    about = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id", "")), "type": "function", "function": about}


def _tools(value: Any) -> list[Message]:
    if value is None:
        return []
    whole = isinstance(value, list) and all(
        isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping) for tool in value
    )
    if not whole:
        raise refused("tools", "tools must be a list of {'type': 'function', 'function': {...}}")
    return [dict(tool) for tool in value]


def _limit(body: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise refused(name, f"{name} must be a whole number from 1")
        return value
    return None


def _stop(value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, Sequence) or not all(isinstance(one, str) and one for one in found):
        raise refused("stop", "stop must be text or a list of texts")
    return tuple(found)
