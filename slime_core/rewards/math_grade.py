r"""The graders `math`, `deepscaler` and `hendrycks_math`: a boxed answer against the label.

The rules of comparison are those of the PRM800K and MATH graders: equal spelling after
normalisation, else equal value; a whole number must be given as one, and a fraction reduced.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from slime_core.rewards.math_expr import same_value
from slime_core.rewards.math_text import boxed_content, hendrycks_strip, unwrap_text
from slime_core.rewards.text import label_values

THOUSANDS = re.compile(r"(\d)(?:,|\\,|,\\!|\{,\})(?=\d{3}(?:\D|$))")
UNITS = re.compile(
    r"(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch"
    r"|yard|dollar|cent|unit)(?:es|s)?\s*(?:\^\s*\{?\d+\}?)?\s*$",
    re.IGNORECASE,
)
SCALES = {"million": 10**6, "billion": 10**9, "trillion": 10**12}
SIMPLE_FRACTION = re.compile(r"-?(?:\\frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+))")
# The space that ends a command stays where a letter follows: `\pi r` is not `\pir`.
SPACE = re.compile(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])|\s+")
BRACKETS = "()[]"
MAX_ANSWER_CHARS = 1000


def grade_math(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1.0 where the last box of the response holds the label (or one of several)."""
    given = boxed_content(response)
    return float(given is not None and any(answers_equal(given, one) for one in truths(label)))


def grade_deepscaler(response: str, label: str, metadata: dict[str, Any]) -> float:
    """The same, for what follows the end of the reasoning; without such an end it is 0.0."""
    for marker in ("</think>", "###Response"):
        if marker in response:
            return grade_math(response.rpartition(marker)[2], label, metadata)
    return 0.0


def grade_hendrycks_math(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1.0 where the last box and the label have the same spelling after normalisation."""
    given = boxed_content(response)
    return float(given is not None and hendrycks_strip(given) == hendrycks_strip(label))


def truths(label: str) -> list[str]:
    """The accepted answers of a label, out of their boxes."""
    found = []
    for one in label_values(label):
        content = boxed_content(one) if "\\boxed" in one or "\\fbox" in one else one
        if content is not None and content.strip():
            found.append(content)
    return found


def answers_equal(given: str, truth: str) -> bool:
    """Whether an answer is the true one; empty answers never are, very long ones only verbatim."""
    if not given.strip() or not truth.strip():
        return False
    if len(given) > MAX_ANSWER_CHARS:
        return given.strip() == truth.strip()
    spelled, true_spelled = (hendrycks_strip(unwrap_text(text)) for text in (given, truth))
    if spelled and spelled == true_spelled:
        return True
    plain, true_plain = simplified(given), simplified(truth)
    if not plain or not true_plain:
        return False
    if plain == true_plain:
        return True
    parts, true_parts = _parts(plain), _parts(true_plain)
    brackets_differ = len(parts) > 1 or len(true_parts) > 1
    if brackets_differ and (plain[0], plain[-1]) != (true_plain[0], true_plain[-1]):
        return False
    return len(parts) == len(true_parts) and all(map(_part_equal, parts, true_parts))


def simplified(text: str) -> str:
    """Text without units, thousands separators, text commands and white space, in lower case."""
    text = unwrap_text(text)
    for piece in ("\\%", "\\$", "$", "%", "^{\\circ}", "^\\circ", "\\left", "\\right", "\\!"):
        text = text.replace(piece, "")
    text = re.sub(r"\\text\{(?:\s*(?:and|or)\s*)\}|\s+(?:and|or)\s+", ",", text)
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r" \1", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = THOUSANDS.sub(r"\1", text)
    for word, factor in SCALES.items():
        text = re.sub(rf"(-?[\d.]+)\s*{word}\b", lambda m, f=factor: _scaled(m[1], f), text)
    text = UNITS.sub("", text.strip())
    text = re.sub(r"^[a-zA-Z]\s*=\s*", "", text.strip())
    text = re.sub(r"(?<=\d)\s*\\ *$", "", text)
    number = _literal(text.replace(" ", ""))
    if number is not None and number.denominator == 1:
        return str(number.numerator)
    return SPACE.sub(lambda match: f"{match[1]} " if match[1] else "", text).lower()


def _part_equal(given: str, truth: str) -> bool:
    if given == truth:
        return True
    if SIMPLE_FRACTION.fullmatch(given) and SIMPLE_FRACTION.fullmatch(truth):
        return _fraction(given) == _fraction(truth)
    if _is_whole(given) != _is_whole(truth):
        return False
    return same_value(given, truth)


def _fraction(text: str) -> tuple[bool, list[str]]:
    """Sign, numerator and denominator as written: 2/4 is not 1/2."""
    return text.startswith("-"), re.findall(r"\d+", text)


def _parts(text: str) -> list[str]:
    """The elements of a tuple or interval, else the text alone."""
    inner = text[1:-1]
    bracketed = len(text) > 2 and text[0] in BRACKETS and text[-1] in BRACKETS
    if bracketed and not any(bracket in inner for bracket in BRACKETS):
        return inner.split(",")
    return [text]


def _literal(text: str) -> Fraction | None:
    if not re.fullmatch(r"[+-]?(?:\d{1,200}\.?\d{0,200}|\.\d{1,200})(?:[eE][+-]?\d{1,2})?", text):
        return None
    return Fraction(text.removesuffix("."))


def _is_whole(text: str) -> bool:
    number = _literal(text)
    return number is not None and number.denominator == 1


def _scaled(number: str, factor: int) -> str:
    value = _literal(number)
    return number if value is None else str(value * factor)
