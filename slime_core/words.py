"""Numbers with their nouns."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 iteration`, `2 iterations`, `0 iterations`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
