"""Calculator, tool loading and the formats of calls."""

import asyncio

import pytest

from slime_core.errors import PluginError
from slime_core.tools.calculator import calculate
from slime_core.tools.interface import Tool, ToolCall, as_text, execute, load_tools
from slime_core.tools.parsers import parse_calls


@pytest.mark.parametrize(
    ("expression", "result"),
    [("6*7", "42"), ("(1+2)/4", "0.75"), ("2**10 % 7", "2"), ("-3 // 2", "-2"), ("8/2", "4")],
)
def test_sums(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    ["9**9**9", "__import__('os')", "a + 1", "[1]*10**9", "(-8)**0.5", "1+", "'a'*9", "1" * 600],
)
def test_what_is_no_sum_is_refused_at_once(expression):
    with pytest.raises(ValueError):
        calculate(expression)


TOOLS = """
from slime_core.tools.interface import Tool
import asyncio

async def look_up(word: str, limit: int = 3) -> dict:
    \"\"\"Looks up a word.\"\"\"
    return {"word": word, "limit": limit}

async def slow() -> str:
    await asyncio.sleep(60)

ready = Tool("ready", "Is ready.", {"type": "object", "properties": {}}, lambda: "yes" * 10_000)
number = 7
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "t.py").write_text(TOOLS)
    return str(tmp_path / "t.py")


def test_functions_become_tools_with_a_schema(path):
    tools = load_tools(["calculator", f"{path}:look_up", f"{path}:ready"])
    assert list(tools) == ["calculator", "look_up", "ready"]
    function = tools["look_up"].schema["function"]
    assert function["description"] == "Looks up a word."
    assert function["parameters"] == {
        "type": "object",
        "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}},
        "required": ["word"],
    }
    assert isinstance(tools["ready"], Tool)
    for paths, message in (
        ([f"{path}:number"], "a Tool or a function is needed"),
        (["calculator", "calculator"], "two tools are called calculator"),
    ):
        with pytest.raises(PluginError, match=message):
            load_tools(paths)


def test_calls_have_deadlines_and_results_are_text(path):
    tools = load_tools([f"{path}:look_up", f"{path}:slow", f"{path}:ready"])
    call = lambda name, **arguments: asyncio.run(  # noqa: E731
        execute(tools, ToolCall(name, arguments), 0.2)
    )
    assert call("look_up", word="a") == '{"word": "a", "limit": 3}'
    assert call("slow") == "error: slow took more than 0.2 s"
    assert call("ready").endswith(" [cut]") and len(call("ready")) == 20_006


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', [("f", {"a": 1})]),
        (
            'x <tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>',
            [("f", {}), ("g", {})],
        ),
        (
            "<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value>"
            "<arg_key>b</arg_key>\n<arg_value>two</arg_value></tool_call>",
            [("f", {"a": 1, "b": "two"})],
        ),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', [("f", {"a": 1})]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}<|eom_id|>', [("f", {"a": 1})]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", {"a": 1})]),
        ("<tool_call>{broken</tool_call>", [("", None)]),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', [("", None)]),
        (
            f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>',
            [("", None)],
        ),
        (f'<tool_call>{{"name": "f", "arguments": {"[" * 5000}</tool_call>', [("", None)]),
        (
            f'<tool_call>{{"name": "f", "arguments": {"[" * 200}{"]" * 200}}}</tool_call>',
            [("", None)],
        ),
        (f'{{"name": "f", "parameters": {{"a": {"9" * 5000}}}}}', []),
        ("no call at all", []),
        ('the answer is {"name": "f"}', []),
    ],
)
def test_each_family_writes_calls_in_its_own_way(text, calls):
    assert [(call.name, call.arguments) for call in parse_calls(text)] == calls


def test_what_no_tokenizer_takes_does_not_leave_a_tool():
    assert as_text("a\ud800b") == "a?b" and as_text(["\ud83d\ude00"]) == '["\\ud83d\\ude00"]'


def test_a_chosen_family_is_the_only_one_that_is_read():
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'
    assert parse_calls(text, "hermes") == [] and len(parse_calls(text, "mistral")) == 1
