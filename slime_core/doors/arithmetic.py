"""`$((NODES * 8))`: whole numbers, as bash counts."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from slime_core.errors import ConfigError

OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}

MOST_NUMBERS = 10_000
"""What one `seq` may print: a list of flags is never longer."""
SEQ = re.compile(r"\s*seq((?:\s+-?\d+){1,3})\s*")


def sequence(command: str) -> str | None:
    """What `seq 1 2 9` prints, as words; None for another command.

    Raises:
        ConfigError: it never ends, or it is too long.
    """
    match = SEQ.fullmatch(command)
    if not match:
        return None
    numbers = [int(text) for text in match[1].split()]
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) > 2 else 1
    last = numbers[-1] + (1 if step > 0 else -1)
    if not step or len(range(first, last, step)) > MOST_NUMBERS:
        raise ConfigError(f"$({command.strip()}) has no end, or more than {MOST_NUMBERS:,} numbers")
    return " ".join(str(number) for number in range(first, last, step))


def evaluate(text: str, value_of: Callable[[str], str]) -> int:
    """The value of an expression of numbers, variables, + - * / % and brackets.

    Args:
        text: the expression; variables may have a `$`.
        value_of: the value of a variable.

    Raises:
        ConfigError: another expression, a variable that is no number, or a division by zero.
    """
    try:
        return _value(ast.parse(text.replace("$", "").strip(), mode="eval").body, value_of)
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"$(({text})) is not counted: {error}") from error


def _value(node: ast.expr, value_of: Callable[[str], str]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return int(value_of(node.id))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, value_of)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _value(node.left, value_of), _value(node.right, value_of)
        return OPERATIONS[type(node.op)](left, right)
    raise ValueError(f"{ast.unparse(node)} is a form that is not read")
