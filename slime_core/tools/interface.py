"""What a tool is, how it is loaded, and how a call is carried out within a deadline."""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from slime_core.errors import PluginError
from slime_core.near import nearest
from slime_core.plugins.load import is_async, load
from slime_core.plugins.threads import in_thread
from slime_core.plugins.user_code import no_exit, raised
from slime_core.tools.calculator import calculate
from slime_core.tools.sandbox import require_sandbox, run_python_async

JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", list: "array"}
MAX_RESULT_CHARS = 20_000


@dataclass(frozen=True)
class ToolCall:
    """A call as a model wrote it. `arguments` is None where they could not be read."""

    name: str
    arguments: dict[str, Any] | None = field(default_factory=dict)


@dataclass(frozen=True)
class Tool:
    """Something a model may call.

    Attributes:
        name: what the model calls it.
        description: what it does, for the model.
        parameters: JSON schema of its arguments.
        function: plain or async; gets the arguments by name, returns text or something JSON.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]

    @property
    def schema(self) -> dict[str, Any]:
        """The description that chat templates take."""
        about = {"name": self.name, "description": self.description}
        return {"type": "function", "function": about | {"parameters": dict(self.parameters)}}


def tool_of(function: Callable[..., Any]) -> Tool:
    """A tool from a function: its name, its docstring, and the types of its parameters."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    kinds = {p.name: JSON_TYPES.get(hints.get(p.name, str), "object") for p in parameters}
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in kinds.items()},
        "required": [p.name for p in parameters if p.default is p.empty],
    }
    about = inspect.getdoc(function) or ""
    return Tool(function.__name__, about, schema, function)


async def run_code(code: str) -> str:
    """Runs a Python program and returns what it prints; nothing is kept from run to run."""
    ran = await run_python_async(code)
    said = ran.stdout + ran.stderr
    if ran.ended is not None:
        return f"error: ended at its limit of {ran.ended}\n{said}"
    return said if ran.well else f"error: exit code {ran.exit_code}\n{said}"


BUILT_IN = {
    "calculator": replace(tool_of(calculate), name="calculator"),
    "python": replace(tool_of(run_code), name="python"),
}


def load_tools(paths: Sequence[str]) -> dict[str, Tool]:
    """Tools by name, from names of built-in ones and import paths of Tools or functions.

    Raises:
        PluginError: a path gives neither, or two tools have one name.
        ConfigError: `python` is wanted where there is no sandbox.
    """
    found: dict[str, Tool] = {}
    for path in paths:
        if path == "python":
            require_sandbox()
        value = BUILT_IN.get(path) or load(path)
        if not isinstance(value, Tool):
            if not inspect.isfunction(value):
                raise PluginError(f"tool {path}: a Tool or a function is needed, not {value!r:.60}")
            value = tool_of(value)
        if value.name in found:
            raise PluginError(f"two tools are called {value.name}; rename one (tool_paths)")
        found[value.name] = value
    return found


async def execute(tools: Mapping[str, Tool], call: ToolCall, timeout_s: float) -> str:
    """Carries out a call. What goes wrong is told to the model as text that begins with `error:`.

    Args:
        timeout_s: deadline; a plain function that overruns it goes on in its thread unheard.
    """
    tool = tools.get(call.name)
    if tool is None:
        close = nearest(call.name, tools)
        hint = f"did you mean {close}?" if close else f"there are {', '.join(tools) or 'none'}"
        return f"error: no tool {call.name!r}; {hint}"
    if call.arguments is None:
        return f"error: the arguments of {call.name} are not a JSON object"
    try:
        inspect.signature(tool.function).bind(**call.arguments)
    except TypeError as error:
        return f"error: {call.name}: {error}"
    try:
        async with asyncio.timeout(timeout_s):
            with no_exit(call.name):
                if is_async(tool.function):
                    result = await tool.function(**call.arguments)
                else:
                    work = partial(tool.function, **call.arguments)
                    result = await in_thread(call.name, work)
    except TimeoutError:
        return f"error: {call.name} took more than {timeout_s:g} s"
    except Exception as error:  # whatever a tool raises is an answer to the model
        return f"error: {raised(error)}"
    return as_text(result)


def as_text(result: Any) -> str:
    """A result as the model reads it, cut at 20,000 characters; half a surrogate pair, which no
    tokenizer takes, becomes a question mark."""
    text = result if isinstance(result, str) else json.dumps(result, default=str)
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MAX_RESULT_CHARS else text[:MAX_RESULT_CHARS] + " [cut]"
