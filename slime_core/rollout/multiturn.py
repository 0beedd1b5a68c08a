"""Multi-turn rollouts with tools: a ready generate function, and the helpers to write one.

    slime train ... --custom-generate-function-path slime_core.rollout.multiturn.generate \\
        --tool-paths calculator --max-turns 4

The helpers `generate_single`, `extract_tool_call`, `execute_tool`, `compute_reward` and
`build_loss_mask` serve a function that is called with a list of samples: they keep the tokens of
each conversation behind the text that the function sees.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator, Sequence
from contextvars import ContextVar
from typing import Any

from slime_core.data.render import encode, render_chat
from slime_core.errors import PluginError
from slime_core.plugins.load import is_async
from slime_core.rewards.exact import grade_exact_match
from slime_core.rollout.runtime import Runtime, current
from slime_core.rollout.turns import Turns
from slime_core.sample import Sample
from slime_core.tools.interface import ToolCall, execute, load_tools
from slime_core.tools.parsers import parse_calls

TRACKS = "conversations"
_LAST: ContextVar[_Track] = ContextVar("slime_last_conversation")


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """Lets the model call tools for up to `max_turns` turns; tool tokens are not trained."""
    tools = load_tools(args.tool_paths)
    turns = Turns(current(), sample)
    while True:
        text = await turns.answer(sampling_params)
        calls = parse_calls(text, args.tool_parser)
        if not calls or turns.over or turns.count >= args.max_turns:
            break
        begun_s = time.monotonic()
        results = await asyncio.gather(
            *(execute(tools, call, args.tool_timeout_s) for call in calls)
        )
        turns.waited(begun_s)
        turns.put_result("\n".join(results))
        if turns.over:
            break
    sample.metadata = sample.metadata | {"round_number": turns.count}
    sample.response = turns.text
    return sample


class ToolResult(str):
    """The text of a tool's answer; may be awaited or used as it is."""

    def __await__(self) -> Generator[Any, None, str]:
        return self
        yield  # makes this a generator


class _Track:
    """One conversation of a list-form function, by messages and by tokens."""

    def __init__(self, runtime: Runtime, conversation: list[Any]) -> None:
        self.conversation = conversation
        self.sample = _origin(runtime, conversation)
        self.turns = Turns(runtime, _scratch(runtime, self.sample, conversation))
        self.seen = len(conversation)
        self.attached = False

    def catch_up(self) -> None:
        """Adds messages that came since the last turn."""
        for message in self.conversation[self.seen :]:
            content, role = str(message.get("content", "")), message.get("role", "tool")
            if role == "assistant":
                if content != self.turns.text:
                    raise PluginError(
                        "a conversation holds an assistant message that the model did not say; "
                        "append what generate_single returned"
                    )
                continue
            self.turns.put_result(content, role)
        self.seen = len(self.conversation)


async def generate_single(*given: Any, **options: Any) -> str:
    """The model's next turn in a conversation.

    Args:
        given: `conversation` or `args, conversation`; a list of messages that the caller extends,
            or a prompt as text.

    Returns:
        Its text, without end tokens.
    """
    conversation = options.get("conversation", given[-1] if given else None)
    if isinstance(conversation, str):
        conversation = [{"role": "user", "content": conversation}]
    if not isinstance(conversation, list):
        raise PluginError("generate_single takes a conversation: a list of messages")
    runtime = current()
    tracks = runtime.notes.setdefault(TRACKS, [])
    track = next((one for one in tracks if one.conversation is conversation), None)
    if track is None:
        track = _Track(runtime, conversation)
        tracks.append(track)
    _LAST.set(track)
    track.catch_up()
    if track.turns.count and track.turns.over:
        return ""
    return await track.turns.answer()


def extract_tool_call(text: str) -> dict[str, Any] | None:
    """The first tool call of a response as {"name", "arguments"}, None where there is none."""
    calls = parse_calls(text, getattr(current().args, "tool_parser", "auto"))
    return {"name": calls[0].name, "arguments": calls[0].arguments} if calls else None


def execute_tool(call: dict[str, Any]) -> Any:
    """Calls a tool of `tool_paths`; the result can be awaited, and is text at once where the tool
    is a plain function. Errors are text that begins with `error:`."""
    args = current().args
    tools = load_tools(args.tool_paths)
    asked = ToolCall(str(call.get("name", "")), call.get("arguments"))
    tool = tools.get(asked.name)
    if tool is not None and is_async(tool.function):
        return execute(tools, asked, args.tool_timeout_s)
    return ToolResult(_at_once(execute(tools, asked, args.tool_timeout_s)))


def compute_reward(sample: Sample) -> float | None:
    """None where a grader is configured (it grades afterwards), else 1.0 for an exact match."""
    args = current().args
    if args.rm_type or args.custom_rm_path:
        return None
    label = sample.label if sample.label is not None else sample.metadata.get("answer")
    track = _LAST.get(None)
    said = track.turns.text if track is not None else ""
    return float(grade_exact_match((sample.response or said).strip(), str(label), sample.metadata))


def build_loss_mask(sample: Sample) -> list[int]:
    """Gives a sample the tokens of the conversation that this task had last; returns its mask: 1
    for what the model sampled, 0 for the rest.

    Raises:
        PluginError: there was none.
    """
    track = _LAST.get(None)
    if track is None or track.attached:
        raise PluginError(f"{sample.describe()}: build_loss_mask without generate_single before")
    _attach(track, sample)
    return list(sample.loss_mask or [])


def attach_conversations(runtime: Runtime, rows: Sequence[Sample]) -> None:
    """Gives rows that a list-form function left without tokens those of their conversation."""
    for row in rows:
        waiting = [t for t in runtime.notes.get(TRACKS, []) if not t.attached]
        if row.response_length or not waiting:
            continue
        match = next((t for t in waiting if t.turns.text == row.response), None)
        if match is not None:
            _attach(match, row)


def _attach(track: _Track, sample: Sample) -> None:
    done = track.turns.sample
    for name in ("tokens", "response_length", "loss_mask", "rollout_log_probs", "spans",
                 "weight_versions", "status", "spec_info", "prefix_cache_info"):  # fmt: skip
        setattr(sample, name, getattr(done, name))
    sample.response = sample.response or track.turns.text
    sample.metadata = sample.metadata | {"round_number": track.turns.count}
    track.attached = True


def _origin(runtime: Runtime, conversation: list[Any]) -> Sample | None:
    """The sample that a new conversation begins with, by its prompt; members are taken in turn."""
    taken = [track.sample for track in runtime.notes.get(TRACKS, [])]
    for sample in runtime.notes.get("samples", []):
        if any(sample is one for one in taken):
            continue
        begins = sample.prompt is conversation or sample.prompt == conversation
        if begins or (len(conversation) == 1 and conversation[0].get("content") == sample.prompt):
            return sample
    return None


def _scratch(runtime: Runtime, origin: Sample | None, conversation: list[Any]) -> Sample:
    """A sample to grow, with the tokens of its prompt."""
    if origin is not None:
        return Sample(
            group_index=origin.group_index, index=origin.index, attempt=origin.attempt,
            tokens=list(origin.tokens), prompt=origin.prompt,
            apply_chat_template_kwargs=origin.apply_chat_template_kwargs,
            multimodal_inputs=origin.multimodal_inputs,
        )  # fmt: skip
    first = next(iter(runtime.notes.get("samples", [])), Sample())
    text = render_chat(runtime.tokenizer, conversation)
    return Sample(
        group_index=first.group_index, index=first.index, attempt=first.attempt,
        tokens=encode(runtime.tokenizer, text), prompt=conversation,
    )  # fmt: skip


def _at_once(work: Any) -> str:
    """Runs a coroutine to its end on a loop of its own; the caller's loop waits meanwhile, so slow
    tools should be async."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(work)))
    thread.start()
    thread.join()
    return found[0]
