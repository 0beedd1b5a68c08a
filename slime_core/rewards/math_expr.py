r"""Equality of mathematical expressions, by a small parser and exact or sampled evaluation.

Model output is never executed: a recursive-descent parser reads plain and LaTeX notation into a
tree, which is evaluated with fractions where possible and complex numbers otherwise. Expressions
with variables are equal if they agree at fixed pseudo-random points (Schwartz 1980 for
polynomials). Sizes are bounded, so an answer cannot make a grader slow.
"""

from __future__ import annotations

import cmath
import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

Value = Fraction | complex
MAX_CHARS = 400
MAX_DEPTH = 60
MAX_POWER = 64
MAX_BITS = 4096
POINTS = 6
TOLERANCE = 1e-9
TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+(?![a-zA-Z]))?|\.\d+)"
    r"|(?P<command>\\[a-zA-Z]+|\\.)|(?P<name>[a-zA-Zα-ωΑ-Ω])|(?P<mark>\*\*|.))",  # noqa: RUF001
    re.DOTALL,
)
FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "cot": lambda z: 1 / cmath.tan(z),
    "sec": lambda z: 1 / cmath.cos(z),
    "csc": lambda z: 1 / cmath.sin(z),
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "ln": cmath.log,
    "log": cmath.log,
    "exp": cmath.exp,
}
CONSTANTS: dict[str, complex] = {"pi": math.pi, "π": math.pi, "e": math.e}
WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
IGNORED = {"\\left", "\\right", "\\,", "\\;", "\\:", "\\!", "\\ ", "\\quad", "\\displaystyle"}


class NotAnExpression(ValueError):
    """The text is not an expression this parser knows."""


@dataclass(frozen=True)
class Node:
    """A tree: `kind` with children, or a leaf with a value or a name."""

    kind: str
    children: tuple[Node, ...] = ()
    value: Value = Fraction(0)
    name: str = ""


def parse_expression(text: str) -> Node:
    """Reads plain or LaTeX notation.

    Raises:
        NotAnExpression: it is something else, or larger than this parser takes.
    """
    if len(text) > MAX_CHARS:
        raise NotAnExpression(f"longer than {MAX_CHARS} characters")
    for word in WORD.findall(text):
        if word not in FUNCTIONS and word != "sqrt":
            raise NotAnExpression(f"{word!r} is a word")
    return _Parser(text).whole()


def same_value(first: str, second: str) -> bool:
    """Whether two texts are expressions of the same value; False where one is no expression."""
    try:
        trees = parse_expression(first), parse_expression(second)
        names = _names(trees[0]) | _names(trees[1])
        if not names:
            return _close(*(_evaluate(tree, {}) for tree in trees))
        return _agree(trees, sorted(names))
    except (NotAnExpression, ArithmeticError, ValueError):
        return False


def exact_value(text: str) -> Value | None:
    """The value of an expression without variables; None for anything else."""
    try:
        return _evaluate(parse_expression(text), {})
    except (NotAnExpression, ArithmeticError, ValueError, KeyError):
        return None


def _agree(trees: tuple[Node, Node], names: list[str]) -> bool:
    generator = random.Random(20260801)
    compared = 0
    for _ in range(4 * POINTS):
        point = {name: complex(generator.uniform(-3, 3)) for name in names}
        try:
            values = [_evaluate(tree, point) for tree in trees]
        except ArithmeticError:
            continue
        if not all(cmath.isfinite(complex(value)) for value in values):
            continue
        if not _close(values[0], values[1]):
            return False
        compared += 1
        if compared == POINTS:
            return True
    return False


def _close(first: Value, second: Value) -> bool:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    a, b = complex(first), complex(second)
    return abs(a - b) <= TOLERANCE * max(1.0, abs(a), abs(b))


def _names(tree: Node) -> frozenset[str]:
    own = frozenset([tree.name]) if tree.kind == "name" else frozenset()
    return own.union(*map(_names, tree.children))


def _evaluate(tree: Node, point: Mapping[str, complex]) -> Value:
    if tree.kind == "number":
        return tree.value
    if tree.kind == "name":
        return point[tree.name]
    values = [_evaluate(child, point) for child in tree.children]
    if tree.kind == "call":
        return FUNCTIONS[tree.name](complex(values[0]))
    return _OPERATIONS[tree.kind](*values)


def _divide(a: Value, b: Value) -> Value:
    if b == 0:
        raise ZeroDivisionError
    return a / b


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1 and abs(exponent) <= MAX_POWER:
            if max(base.numerator.bit_length(), base.denominator.bit_length()) > MAX_BITS:
                raise OverflowError
            return base ** int(exponent)
        if base >= 0:
            return _root_of(base, exponent)
    return complex(base) ** complex(exponent)


def _root_of(base: Fraction, exponent: Fraction) -> Value:
    """Exact where numerator and denominator are perfect squares, else a float."""
    if exponent == Fraction(1, 2):
        roots = math.isqrt(base.numerator), math.isqrt(base.denominator)
        if roots[0] ** 2 == base.numerator and roots[1] ** 2 == base.denominator:
            return Fraction(*roots)
    return complex(float(base) ** float(exponent))


def _factorial(value: Value) -> Value:
    if isinstance(value, Fraction) and value.denominator == 1 and 0 <= value <= MAX_POWER:
        return Fraction(math.factorial(int(value)))
    raise OverflowError


_OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": _divide,
    "power": _power,
    "negative": lambda a: -a,
    "absolute": lambda a: abs(a) if isinstance(a, Fraction) else complex(abs(a)),
    "factorial": _factorial,
}


@lru_cache(maxsize=1024)
def _tokens(text: str) -> tuple[str, ...]:
    found = (match.group().strip() for match in TOKEN.finditer(text))
    return tuple(token for token in found if token and token not in IGNORED)


class _Parser:
    """One pass over the tokens; each method reads one level of precedence."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        tree = self._sum()
        if self._at < len(self._tokens):
            raise NotAnExpression(f"unexpected {self._tokens[self._at]!r}")
        return tree

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        if not token:
            raise NotAnExpression("ends too early")
        self._at += 1
        return token

    def _accept(self, *tokens: str) -> str:
        return self._next() if self._peek() in tokens else ""

    def _expect(self, token: str) -> None:
        if not self._accept(token):
            raise NotAnExpression(f"expected {token!r}, found {self._peek()!r}")

    def _sum(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotAnExpression("nested too deeply")
        tree = self._product()
        while sign := self._accept("+", "-", "−"):  # noqa: RUF001
            kind = "add" if sign == "+" else "subtract"
            tree = Node(kind, (tree, self._product()))
        self._depth -= 1
        return tree

    def _product(self) -> Node:
        tree = self._signed()
        while True:
            if self._accept("*", "\\cdot", "\\times", "×", "·"):  # noqa: RUF001
                tree = Node("multiply", (tree, self._signed()))
            elif self._accept("/", "\\div", "÷"):
                tree = Node("divide", (tree, self._signed()))
            elif self._starts_factor():
                tree = Node("multiply", (tree, self._factor()))
            else:
                return tree

    def _starts_factor(self) -> bool:
        token = self._peek()
        if not token or token in "+-−*/^_)}]|,;=<>!%&'\"":  # noqa: RUF001
            return False
        if token[0].isdigit() or token[0] == ".":  # "2 3" is two numbers, not a product.
            return not self._after_number()
        return token not in ("\\cdot", "\\times", "\\div", "\\}", "\\%", "×", "·", "÷")  # noqa: RUF001

    def _after_number(self) -> bool:
        return self._at > 0 and self._tokens[self._at - 1][-1].isdigit()

    def _signed(self) -> Node:
        signs = 0
        while sign := self._accept("+", "-", "−"):  # noqa: RUF001
            signs += sign != "+"
        tree = self._factor()
        return Node("negative", (tree,)) if signs % 2 else tree

    def _factor(self) -> Node:
        base = self._atom()
        while self._accept("!"):
            base = Node("factorial", (base,))
        if self._accept("^", "**"):
            base = Node("power", (base, self._exponent()))
        return base

    def _exponent(self) -> Node:
        if self._peek() in ("-", "+", "−"):  # noqa: RUF001
            return self._signed()
        return self._atom()

    def _argument(self) -> Node:
        """`{...}`, or in LaTeX fashion a single digit, name or command (`\\frac12`)."""
        token = self._peek()
        if token.isdigit() and len(token) > 1:
            split = (token[0], token[1:])
            self._tokens = (*self._tokens[: self._at], *split, *self._tokens[self._at + 1 :])
        return self._atom()

    def _atom(self) -> Node:
        token = self._next()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return Node("number", value=_number(token))
        closing = {"(": ")", "{": "}", "[": "]", "|": "|", "\\lvert": "\\rvert"}.get(token)
        if closing:
            tree = self._sum()
            self._expect(closing)
            return Node("absolute", (tree,)) if closing in ("|", "\\rvert") else tree
        if token.startswith("\\"):
            return self._command(token[1:])
        return self._word(token)

    def _command(self, name: str) -> Node:
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            return Node("divide", (self._argument(), self._argument()))
        if name == "sqrt":
            return self._root()
        if name in FUNCTIONS:
            return self._call(name)
        if name in CONSTANTS:
            return Node("number", value=complex(CONSTANTS[name]))
        if name in ("text", "mathrm", "mathbf", "textbf", "mathit"):
            return self._argument()
        if name.isalpha() and name not in ("infty", "cup", "cap", "in", "pm", "le", "ge", "ne"):
            return Node("name", name=name)
        raise NotAnExpression(f"unknown command {name!r}")

    def _root(self) -> Node:
        degree = Node("number", value=Fraction(2))
        if self._accept("["):
            degree = self._sum()
            self._expect("]")
        one = Node("number", value=Fraction(1))
        return Node("power", (self._argument(), Node("divide", (one, degree))))

    def _call(self, name: str) -> Node:
        """A function, with `^` before its argument and no need of brackets."""
        power = self._exponent() if self._accept("^") else None
        if name == "log" and self._accept("_"):
            base = self._argument()
            logarithm = Node("call", (self._factor(),), name="ln")
            return Node("divide", (logarithm, Node("call", (base,), name="ln")))
        tree = Node("call", (self._factor(),), name=name)
        return Node("power", (tree, power)) if power else tree

    def _word(self, letter: str) -> Node:
        """A variable, or a function or constant spelled letter by letter (`sqrt(2)`, `pi`)."""
        if not letter.isalpha():
            raise NotAnExpression(f"unexpected {letter!r}")
        for word in ("sqrt", *FUNCTIONS, *CONSTANTS):
            letters = tuple(word)
            end = self._at - 1 + len(letters)
            if len(word) > 1 and self._tokens[self._at - 1 : end] == letters:
                self._at = end
                return self._command(word)
        if letter in CONSTANTS:
            return Node("number", value=complex(CONSTANTS[letter]))
        if letter == "i":
            return Node("number", value=1j)
        if self._accept("_"):
            return Node("name", name=f"{letter}_{self._next()}")
        return Node("name", name=letter)


def _number(token: str) -> Fraction:
    _, _, exponent = token.lower().partition("e")
    if len(token) > 200 or (exponent and abs(int(exponent)) > 300):
        raise NotAnExpression("number too large")
    return Fraction(token)
