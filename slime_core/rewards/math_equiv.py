r"""The grader `math_verify`: equality of answers written freely, in LaTeX or as plain numbers.

Answers are looked for in boxes, then in one-line formulas (`$...$`, `\(...\)`, `\[...\]`), then as
the last number. Lists and sets are compared without order, intervals and tuples with it; 28 % is
28 and also 0.28.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from slime_core.rewards.math_expr import same_value
from slime_core.rewards.math_text import boxed_content, last_boxed

FORMULA = re.compile(r"\$\$([^$\n]+)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]")
PERCENT_AFTER = re.compile(r"\s*(?:\\?%|percent\b|percentage\b)")
NUMBER = re.compile(
    r"(?<![\w.])[-+−]?(?:\d{1,3}(?:[ ,]\d{3})+(?!\d)(?:\.\d+)?|\d+(?:[.,]\d+)?|\.\d+)"  # noqa: RUF001
    r"(?:/\d+)?"
)
JOINED = re.compile(r"[\s$]*(?:,|;|and|or|\\text\{ ?(?:and|or) ?\})[\s$]*")
MODES = ("latex", "expr")
MAX_ANSWER_CHARS = 1000


@dataclass(frozen=True)
class Found:
    """An answer as written, and whether a per cent sign belongs to it."""

    text: str
    percent: bool = False


def grade_math_verify(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1.0 where the response's answer equals the label; the label may be bare LaTeX."""
    gold = label if extract_answer(label, ("latex",)) else f"${label.strip()}$"
    return float(equivalent(gold, response))


def equivalent(gold: str, pred: str, extract: Sequence[str] = MODES) -> bool:
    """Whether two texts hold the same answer.

    Args:
        gold: text with the true answer.
        pred: text with the given one.
        extract: where to look: "latex" and "expr", in this order of preference.
    """
    truth, given = extract_answer(gold, extract), extract_answer(pred, extract)
    if truth is None or given is None:
        return False
    if len(given.text) > MAX_ANSWER_CHARS:
        return given == truth
    pairs = [(a, b) for a in _readings(truth) for b in _readings(given)]
    return any(_same(a, b) for a, b in pairs)


def extract_answer(text: str, extract: Sequence[str] = MODES) -> Found | None:
    """The answer of a text; None where it holds none."""
    if "latex" in extract:
        boxes = _last_boxes(text)
        if boxes:
            return _cleaned(", ".join(boxes))
        formulas = list(FORMULA.finditer(text))
        if formulas:
            last = formulas[-1]
            content = next(group for group in last.groups() if group is not None)
            return _cleaned(content, bool(PERCENT_AFTER.match(text[last.end() :])))
    if "expr" in extract:
        numbers = list(NUMBER.finditer(text))
        if numbers:
            last = numbers[-1]
            percent = bool(PERCENT_AFTER.match(text[last.end() :]))
            return Found(_plain_number(last.group()), percent)
    return None


def _last_boxes(text: str) -> list[str]:
    """Contents of the last box and of those joined to it by a comma, `and` or `or`."""
    contents: list[str] = []
    while box := last_boxed(text):
        content = boxed_content(text)
        before, _, after = text.rpartition(box)
        if contents and not JOINED.fullmatch(after):
            break
        contents.insert(0, content or "")
        text = before
    return contents


def _cleaned(text: str, percent: bool = False) -> Found:
    """A formula without spacing commands, units and the left side of an equation."""
    percent = percent or bool(re.search(r"\\?%\s*$", text))
    text = re.sub(r"\\?%\s*$", "", text)
    text = re.sub(r"\\(?:text|mathrm|mbox)\{[^{}]*\}\s*$", "", text.strip()) or text
    for piece in ("\\left", "\\right", "\\!", "\\,", "\\;", "\\$", "$", "^\\circ", "^{\\circ}"):
        text = text.replace(piece, "")
    text = re.sub(r"(\d),(?=\d{3}(?!\d))", r"\1", text) if "," in text and "(" not in text else text
    sides = text.split("=")
    if len(sides) > 1 and re.fullmatch(r"\s*[a-zA-Z](?:_\w+|\([a-z]\))?\s*", sides[0]):
        text = sides[-1]
    return Found(text.strip().rstrip(".").strip(), percent)


def _plain_number(text: str) -> str:
    text = text.replace("−", "-")  # noqa: RUF001
    if re.fullmatch(r"[-+]?\d{1,3}(?:[ ,]\d{3})+(?:\.\d+)?", text):
        return re.sub("[ ,]", "", text)
    return text.replace(",", ".")


def _readings(found: Found) -> list[str]:
    """28 % is 28 and 28/100."""
    return [found.text, f"({found.text})/100"] if found.percent else [found.text]


def _same(first: str, second: str) -> bool:
    a, b = _structure(first), _structure(second)
    if a[0] in ("", "{") and b[0] in ("", "{"):
        return _same_unordered(a[1], b[1])
    if a[0] != b[0] or len(a[1]) != len(b[1]):
        return False
    return all(map(_same_item, a[1], b[1]))


def _structure(text: str) -> tuple[str, list[str]]:
    r"""(brackets, items): "{" for `\{...\}`, "" for a bare list, else both brackets."""
    text = text.strip()
    match = re.fullmatch(r"\\\{(.*)\\\}", text)
    if match:
        return "{", _split(match[1])
    if text[:1] in "([" and text[-1:] in ")]" and len(text) > 2:
        items = _split(text[1:-1])
        if len(items) > 1 and _closes_at_end(text):
            return text[0] + text[-1], items
    return "", _split(text)


def _split(text: str) -> list[str]:
    """Parts between commas or semicolons outside all brackets."""
    mark = ";" if ";" in text else ","
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == mark and not depth:
            parts.append(text[start:position])
            start = position + 1
    return [part.strip() for part in (*parts, text[start:])]


def _closes_at_end(text: str) -> bool:
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if not depth:
            return position == len(text) - 1
    return False


def _same_unordered(first: list[str], second: list[str]) -> bool:
    """Each item of one has its own equal among the other's."""
    if len(first) != len(second) or len(first) > 64:
        return False
    rest = list(second)
    for item in first:
        found = next((other for other in rest if _same_item(item, other)), None)
        if found is None:
            return False
        rest.remove(found)
    return True


def _same_item(first: str, second: str) -> bool:
    spelled = [re.sub(r"\s+", "", text).removeprefix("+") for text in (first, second)]
    if spelled[0] == spelled[1]:
        return bool(spelled[0])
    if any(text[:1] in ("(", "[") and "," in text for text in spelled):
        return _structure(first)[0] == _structure(second)[0] != "" and _same(first, second)
    numbers = [_decimal(text) for text in spelled]
    if None not in numbers:
        return numbers[0] == numbers[1]
    return same_value(first, second)


def _decimal(text: str) -> Fraction | None:
    return Fraction(text) if re.fullmatch(r"-?\d{1,200}(?:\.\d{1,200})?", text) else None
