r"""Mathematical answers as text: finding the box, and rewriting an answer to one spelling."""

from __future__ import annotations

import re

BOXES = ("\\boxed", "\\fbox")  # A frame counts only where there is no box.
SHORT_SQRT = re.compile(r"\\sqrt\s*([^\s{\[\\])")
SHORT_FRACTION = re.compile(r"\\frac\s*(\{[^{}]*\}|[^\s{}\\])\s*(\{[^{}]*\}|[^\s{}\\])")
INTEGER_FRACTION = re.compile(r"(-?\d+)/(-?\d+)")
# Order matters: longer spellings come before their parts.
DROPPED = (
    "\n",
    "\\!",
    "\\left",
    "\\right",
    "^{\\circ}",
    "^\\circ",
    "\\$",
    "\\%",
    "%",
)


def last_boxed(text: str) -> str | None:
    r"""The last `\boxed{...}`, `\fbox{...}` or `\boxed ...`, whole; None where no box closes."""
    start = next((text.rfind(box) for box in BOXES if box in text), -1)
    spaced = text.rfind("\\boxed ")
    if start < 0:
        return None
    if start == spaced:
        return "\\boxed " + text[spaced + len("\\boxed ") :].split("$")[0]
    open_braces = 0
    for position in range(text.find("{", start), len(text)) if "{" in text[start:] else ():
        if text[position] == "{":
            open_braces += 1
        elif text[position] == "}":
            open_braces -= 1
            if not open_braces:
                return text[start : position + 1]
    return None


def boxed_content(text: str) -> str | None:
    """What stands in the last box; None without one."""
    box = last_boxed(text)
    if box is None:
        return None
    if box.startswith("\\boxed "):
        return box.removeprefix("\\boxed ")
    return box[box.index("{") + 1 : -1]


def unwrap_text(text: str) -> str:
    r"""An answer that is `\text{...}` as a whole becomes its content."""
    match = re.fullmatch(r"\s*\\text\{(.+?)\}\s*", text)
    return match[1].strip() if match else text.strip()


def hendrycks_strip(text: str) -> str:
    """The common spelling of an answer, after the MATH benchmark's rules.

    White space, degrees, per cent, dollars and trailing units vanish; fractions and roots get
    their braces; 0.5 becomes a half, and a/b of two integers a fraction.
    """
    for piece in DROPPED:
        text = text.replace(piece, "")
    text = text.replace("\\\\", "\\").replace("tfrac", "frac").replace("dfrac", "frac")
    text = _without_units(text)
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    text = _right_side(text)
    text = SHORT_SQRT.sub(r"\\sqrt{\1}", text).replace(" ", "")
    text = SHORT_FRACTION.sub(_braced, text)
    if text == "0.5":
        return "\\frac{1}{2}"
    match = INTEGER_FRACTION.fullmatch(text)
    return f"\\frac{{{match[1]}}}{{{match[2]}}}" if match else text


def _without_units(text: str) -> str:
    r"""Drops one trailing `\text{ unit}`; a box of text alone stays."""
    before, mark, _ = text.partition("\\text{ ")
    return before if mark and "\\text{ " not in text[len(before) + len(mark) :] else text


def _right_side(text: str) -> str:
    """`k = 5` is 5 where the left side is a short name."""
    sides = text.split("=")
    return sides[1] if len(sides) == 2 and len(sides[0].strip()) <= 2 else text


def _braced(match: re.Match[str]) -> str:
    parts = [part if part.startswith("{") else f"{{{part}}}" for part in match.groups()]
    return "\\frac" + "".join(parts)
