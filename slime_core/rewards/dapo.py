r"""The grader `dapo`: the answer after `Answer:` or in a box, equal to the label as a string.

It returns {"score": 1.0 or -1.0, "acc", "pred"}, to be used with `--reward-key score`.
"""

from __future__ import annotations

import re
from typing import Any

from slime_core.rewards.math_text import boxed_content

TAIL_CHARS = 300
BOX_TAIL_CHARS = 100
INVALID = "[INVALID]"
ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
# Units and fillers of the Minerva paper's normalisation (Lewkowycz et al. 2022, appendix D).
REMOVED = [
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "hours",
    "km",
    "units",
    "\\ldots",
    "sue",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
]
UNWRAPPED = ("text", "textbf", "overline", "boxed")


def grade_dapo(response: str, label: str, metadata: dict[str, Any]) -> dict[str, Any]:
    """Grades the last 300 characters; with metadata["strict_box"] the answer must be boxed."""
    return dapo_score(response, label, strict_box=bool(metadata.get("strict_box")))


def dapo_score(response: str, label: str, *, strict_box: bool) -> dict[str, Any]:
    """{"score", "acc", "pred"} of a response.

    Args:
        response: without end tokens.
        label: the true answer; a float of a whole number counts as that number.
        strict_box: look for a box in the last 100 characters and compare it as it is.
    """
    tail = response[-TAIL_CHARS:]
    truth = re.sub(r"^(-?\d+)\.0+$", r"\1", label)
    if strict_box:
        pred = boxed_content(tail[-BOX_TAIL_CHARS:])
        right = pred == truth
    else:
        answers = ANSWER.findall(tail)
        pred = dapo_normalize(answers[-1]) if answers else INVALID
        right = pred == dapo_normalize(truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


def dapo_normalize(text: str) -> str:
    """The Minerva spelling of a final answer."""
    text = text.split("=")[-1]
    for old, new in REPLACED:
        text = text.replace(old, new)
    for piece in REMOVED:
        text = text.replace(piece, "")
    text = re.sub(r"^(.*?)\$(.*?)\$(.*)$", r"$\2$", text, flags=re.DOTALL)
    for command in UNWRAPPED:
        text = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text)
    text = text.replace("$", "")
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()
