"""The graders `code` and `code_share`: a program of the response against tests, in a sandbox.

Tests stand in metadata["tests"], or in the label, in one of these forms:

- Python: assertions that run behind the program; with metadata["entry_point"] they define
  `check(candidate)`, which is called.
- a list of {"input": ..., "output": ...}: what the program reads and has to print.
- {"inputs": [...], "outputs": [...]}: the same as two lists; with "fn_name" a function of that name
  (a method of `Solution` where it has that class) is called with each list of arguments.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

from slime_core.errors import RewardError
from slime_core.rewards.text import after_thinking
from slime_core.tools.sandbox import Limits, require_sandbox, run_python
from slime_core.untrusted_json import read_json

FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.DOTALL)
TIME_LIMIT_S = 10.0
CALL = """
import json as _json, sys as _sys
_name, _given, _word = _json.loads(_sys.stdin.read())
_place = globals().get(_name) or getattr(globals()["Solution"](), _name)
print(_word + _json.dumps(_place(*_given)))
"""

__all__ = ["grade_code", "grade_code_share", "require_sandbox"]


def grade_code(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 where the program passes all tests.

    Raises:
        RewardError: there are no tests, or they have no form that is known.
        ConfigError: there is no sandbox.
    """
    return float(all(_outcomes(response, label, metadata)))


def grade_code_share(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """The share of the tests that the program passes. Raises as `grade_code`."""
    outcomes = list(_outcomes(response, label, metadata))
    return sum(outcomes) / len(outcomes)


def program_of(response: str) -> str:
    """The last fenced block behind the reasoning, or else all that stands there."""
    text = after_thinking(response)
    fenced = FENCE.findall(text)
    return fenced[-1] if fenced else text


def _outcomes(response: str, label: str | None, metadata: dict[str, Any]) -> Iterator[bool]:
    """Test by test, so that whoever wants all of them can stop at the first that fails."""
    tests = _tests(metadata.get("tests") or label)
    program = program_of(response)
    limits = Limits(time_s=float(metadata.get("time_limit_s") or TIME_LIMIT_S))
    if isinstance(tests, str):
        entry = metadata.get("entry_point")
        called = f"\ncheck({entry})\n" if entry else "\n"
        yield _passes(f"{program}\n{tests}{called}", "", limits)
        return
    for name, given, wanted in tests:
        if name is not None:
            yield _returns(f"{program}\n{CALL}", [name, given], wanted, limits)
        else:
            ran = run_python(program, _text(given), limits)
            yield ran.well and _lines(ran.stdout) == _lines(_text(wanted))


def _passes(program: str, stdin: str, limits: Limits) -> bool:
    """Whether it comes to its last line. A program that leaves early fails, unless it reads the
    word in its own source: assertions cannot be kept from what they run beside. Tests of inputs
    and outputs are compared outside."""
    word = secrets.token_hex(8)
    ran = run_python(f"{program}\nprint({word!r})\n", stdin, limits)
    return ran.well and ran.stdout.rstrip().endswith(word)


def _returns(program: str, call: list[Any], wanted: Any, limits: Limits) -> bool:
    """Whether the function's value is the wanted one, which the program never sees."""
    word = secrets.token_hex(8)
    ran = run_python(program, json.dumps([*call, word]), limits)
    _, found, value = ran.stdout.rpartition(word)
    if not ran.well or not found:
        return False
    try:
        return read_json(value) == wanted
    except ValueError:
        return False


def _tests(given: Any) -> str | list[tuple[str | None, Any, Any]]:
    """Assertions as text, or (function or None, input, output) each."""
    if isinstance(given, str):
        try:
            given = read_json(given)
        except ValueError:
            return _known(given.strip())
    if isinstance(given, dict) and {"inputs", "outputs"} <= set(given):
        pairs = zip(given["inputs"], given["outputs"], strict=False)
        return _known([(given.get("fn_name"), one, other) for one, other in pairs])
    if isinstance(given, list) and all(
        isinstance(one, dict) and {"input", "output"} <= set(one) for one in given
    ):
        return _known([(one.get("fn_name"), one["input"], one["output"]) for one in given])
    raise RewardError(
        "code needs tests in metadata['tests'] or the label: assertions, a list of "
        '{"input", "output"}, or {"inputs", "outputs"}'
    )


def _known(tests: Any) -> Any:
    if not tests:
        raise RewardError("code needs tests, and there are none")
    return tests


def _text(value: Any) -> str:
    """Input or output as text; lists are lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
