"""The grader `gpqa`: which option of a multiple-choice question a response settles on."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from slime_core.rewards.math_text import boxed_content
from slime_core.rewards.text import after_thinking

DEFAULT_LETTERS = string.ascii_uppercase[:10]
MARKED = r"[\s*_(\[{\"'$]*"
CUE = re.compile(
    r"\b(?:answer|choice|option)s?\b(?:\s+(?:letter|choice|option))?[\s*_\"']*"
    r"(?:is|was|must be|should be|would be|will be|are|=|:|：)*",  # noqa: RUF001
    re.IGNORECASE,
)
NEGATED = re.compile(
    r"\b(?:not|neither|nor|isn't|excludes?|rather than|instead of)" + MARKED + r"[A-Za-z]\b"
)
LETTER = re.compile(r"(?<![A-Za-z0-9'’])([A-Z])(?![A-Za-z0-9'’])")  # noqa: RUF001
SMALL_LETTER = re.compile(MARKED + r"(?:option |choice )?" + MARKED + r"([a-z])[\s*_)\]}\"'$.!]*$")
EMPHASISED = re.compile(r"\*\*\s*\(?([A-Z])\)?[.:]?\s*\*\*")
BRACKETED = re.compile(r"\(([A-Z])\)")
ALONE = re.compile(r"^[\s*_(\[]*([A-Za-z])[\s*_)\].:]*$")


def grade_gpqa(response: str, label: str, metadata: dict[str, Any]) -> float:
    """1.0 where the response settles on the correct option.

    Args:
        response: reasoning before `</think>` is not looked at.
        label: the correct letter, or the correct option's text.
        metadata: may hold choices (texts in order, or letter -> text), valid_letters,
            correct_letter, correct_answer or answer_text.
    """
    options = _options(metadata)
    letters = _letters(metadata, options)
    truth = _correct_letter(label, metadata, options, letters)
    text = after_thinking(response)
    chosen = chosen_letter(text)
    if chosen is not None and (truth is not None or chosen in letters):
        return float(chosen == truth and chosen in letters)
    return float(_names_answer(text, label, metadata, options, truth))


def chosen_letter(text: str) -> str | None:
    """The option letter a text settles on, whether or not there is such an option."""
    boxed = boxed_content(text)
    if boxed is not None:
        match = ALONE.match(re.sub(r"\\text(?:bf)?\{(.*?)\}", r"\1", boxed))
        if match:
            return match[1].upper()
    for match in reversed(list(CUE.finditer(text))):
        rest = NEGATED.sub(" ", text[match.end() :].partition("\n")[0])
        found = LETTER.search(_sentence(rest)) or SMALL_LETTER.match(rest)
        if found and not _is_pronoun(rest, found):
            return found[1].upper()
    lines = [line for line in text.splitlines() if line.strip()]
    alone = ALONE.match(lines[-1]) if lines else None
    if alone:
        return alone[1].upper()
    for pattern in (EMPHASISED, BRACKETED):
        found = pattern.findall(text)
        if found:
            return found[-1]
    return None


def _sentence(text: str) -> str:
    """Up to the end of the sentence; the point after a letter does not end it."""
    return re.split(r"(?<=[a-z0-9]{2})[.!?](?:\s|$)", text)[0]


def _is_pronoun(rest: str, found: re.Match[str]) -> bool:
    """Whether the letter is the English word I or A of a longer sentence."""
    after = rest[found.end() :].lstrip()
    return found[1] in ("I", "A", "a") and bool(re.match(r"[a-z]", after))


def _options(metadata: dict[str, Any]) -> dict[str, str]:
    """Letter -> text of the choices, if they are known."""
    choices = metadata.get("choices")
    if isinstance(choices, dict):
        return {str(letter).upper(): str(text) for letter, text in choices.items()}
    if not choices:
        return {}
    return dict(zip(string.ascii_uppercase, map(str, choices), strict=False))


def _letters(metadata: dict[str, Any], options: dict[str, str]) -> Sequence[str]:
    given = metadata.get("valid_letters")
    if given:
        return [str(letter).upper() for letter in given]
    return list(options) or list(DEFAULT_LETTERS)


def _correct_letter(
    label: str, metadata: dict[str, Any], options: dict[str, str], letters: Sequence[str]
) -> str | None:
    given = metadata.get("correct_letter")
    if given:
        return str(given).strip().upper()
    if label.strip().strip("().").upper() in letters:
        return label.strip().strip("().").upper()
    wanted = _plain(label)
    matching = [letter for letter, text in options.items() if _plain(text) == wanted]
    return matching[0] if len(matching) == 1 else None


def _names_answer(
    text: str, label: str, metadata: dict[str, Any], options: dict[str, str], truth: str | None
) -> bool:
    """Whether the text holds the correct option's words and no other option's."""
    answers = [metadata.get("correct_answer"), metadata.get("answer_text")]
    answers.append(options.get(truth) if truth else None)
    if truth is None or len(label.strip()) > 1:
        answers.append(label)
    right = {_plain(str(answer)) for answer in answers if answer} - {""}
    wrong = {_plain(option) for option in options.values()} - {""}
    # The longest first: "acetic acid" does not name "acid".
    words, named = f" {_plain(text)} ", set()
    for answer in sorted(right | wrong, key=lambda one: (-len(one), one)):
        if f" {answer} " in words:
            named.add(answer)
            words = words.replace(f" {answer} ", " | ")
    return bool(named) and named <= right


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w\s]", " ", text.lower()).split())
