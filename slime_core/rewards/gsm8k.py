"""Graders for answers that are one number: after `####`, or the last number of the response."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

TAIL_CHARS = 300
MARKED = re.compile(r"#### (-?[0-9.,]+)")
PIECE = re.compile(r"-?[0-9.,]+")
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def grade_gsm8k(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1.0 where the number after the last `####`, or else the last number, has the label's value.

    A label may be a whole solution that ends in `#### 42`.
    """
    given = last_number(response.rpartition("####")[2] if "####" in response else response)
    truth = last_number(label.rpartition("####")[2])
    return float(given is not None and given == truth)


def grade_gsm8k_strict(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1.0 where what follows the last `#### ` equals the label as a string, commas aside."""
    found = MARKED.findall(response[-TAIL_CHARS:])
    return float(bool(found) and found[-1].replace(",", "") == label)


def grade_gsm8k_flexible(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1.0 where the last number equals the label as a string, commas aside."""
    found = [piece for piece in PIECE.findall(response[-TAIL_CHARS:]) if piece not in ("", ".")]
    return float(bool(found) and found[-1].replace(",", "") == label)


def last_number(text: str) -> Fraction | None:
    """The value of the last number in a text, sign and thousands separators included."""
    found = NUMBER.findall(text)
    if not found or len(found[-1]) > 400:
        return None
    return Fraction(found[-1].replace(",", ""))
