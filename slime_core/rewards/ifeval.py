"""The grader `ifeval`: does a response follow verifiable instructions?

Instructions are named as in IFEval (Zhou et al. 2023) by metadata["instruction_id_list"], with
their arguments in metadata["kwargs"]. No language model or network is asked; an instruction that
needs one, or that is unknown, fails the sample by name rather than scoring it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from slime_core.errors import RewardError
from slime_core.rewards.text import after_thinking
from slime_core.untrusted_json import read_json

Check = Callable[..., bool]


def grade_ifeval(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 where all instructions are followed.

    Raises:
        RewardError: no instructions, or one that cannot be checked here.
    """
    return grade_with(CHECKS, response, metadata)


def grade_with(checks: Mapping[str, Check], response: str, metadata: dict[str, Any]) -> float:
    """The same with a table of instructions by name."""
    names = metadata.get("instruction_id_list") or []
    arguments = metadata.get("kwargs")
    arguments = [{}] * len(names) if arguments is None else arguments
    if not names or len(arguments) != len(names):
        raise RewardError("metadata needs instruction_id_list, and kwargs of the same length")
    text = after_thinking(response).strip()
    return float(
        all(
            follows(text, name, given or {}, checks)
            for name, given in zip(names, arguments, strict=True)
        )
    )


def follows(
    text: str, name: str, arguments: Mapping[str, Any], checks: Mapping[str, Check] | None = None
) -> bool:
    """Whether a text follows one instruction; empty texts follow none."""
    checks = CHECKS if checks is None else checks
    if name not in checks:
        raise RewardError(f"instruction {name!r} cannot be checked; known: {', '.join(checks)}")
    given = {key: value for key, value in arguments.items() if value is not None}
    return bool(text.strip()) and checks[name](text, **given)


def compares(count: int, wanted: int, relation: str) -> bool:
    """`at least`, `less than`, `at most`, `exactly`, or `around`: within a tenth, 1 at least."""
    outcomes = {
        "at least": count >= wanted,
        "less than": count < wanted,
        "at most": count <= wanted,
        "more than": count > wanted,
        "exactly": count == wanted,
        "around": abs(count - wanted) <= max(round(wanted * 0.1), 1),
    }
    if relation not in outcomes:
        raise RewardError(f"unknown relation {relation!r}; known: {', '.join(outcomes)}")
    return outcomes[relation]


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’-]\w+)*", text)  # noqa: RUF001


def sentences_of(text: str) -> list[str]:
    parts = re.split(r"(?<=[.!?])[\"')\]]*\s+|\n+", text)
    return [part for part in parts if re.search(r"\w", part)]


def paragraphs_of(text: str, mark: str) -> list[str]:
    return [part.strip() for part in re.split(mark, text) if part.strip()]


def capital_words_frequency(text: str, n: int, relation: str) -> bool:
    """How many words are written in capitals."""
    return compares(len(re.findall(r"\b[A-Z]+\b", text)), n, relation)


def choice_present(text: str, options: Iterable[str]) -> bool:
    """Whether one of the options stands in the text."""
    return any(option in text for option in options)


def _has_word(text: str, word: str) -> bool:
    return bool(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE))


def _keywords(text: str, keywords: Sequence[str]) -> bool:
    return all(_has_word(text, word) for word in keywords)


def _forbidden(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(_has_word(text, word) for word in forbidden_words)


def _keyword_count(text: str, keyword: str, frequency: int, relation: str) -> bool:
    found = re.findall(re.escape(keyword), text, re.IGNORECASE)
    return compares(len(found), frequency, relation)


def _letter_count(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return compares(text.lower().count(letter.lower()), let_frequency, let_relation)


def _word_count(text: str, num_words: int, relation: str) -> bool:
    return compares(len(words_of(text)), num_words, relation)


def _sentence_count(text: str, num_sentences: int, relation: str) -> bool:
    return compares(len(sentences_of(text)), num_sentences, relation)


def _paragraph_count(text: str, num_paragraphs: int) -> bool:
    return len(paragraphs_of(text, r"\s?\*\*\*\s?")) == num_paragraphs


def _paragraph_start(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = paragraphs_of(text, r"\n\s*\n")
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    words = words_of(parts[nth_paragraph - 1])
    return bool(words) and words[0].lower() == first_word.lower().strip()


def _placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    letters = re.findall(r"\w", postscript_marker)
    pattern = r"\.?\s?".join(map(re.escape, letters))
    return bool(re.search(rf"^\s*{pattern}\b", text, re.IGNORECASE | re.MULTILINE))


def _bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^\s*(?:\*(?!\*)|-)\s+\S", text, re.MULTILINE)) == num_bullets


def _highlights(text: str, num_highlights: int) -> bool:
    double = re.findall(r"\*\*([^*\n]+)\*\*", text)
    single = re.findall(r"\*([^*\n]+)\*", re.sub(r"\*\*[^*\n]+\*\*", " ", text))
    return sum(bool(part.strip()) for part in double + single) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    pattern = rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?"
    return len(re.split(pattern, text)) - 1 >= num_sections


def _json(text: str) -> bool:
    body = re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip()
    try:
        read_json(body)
    except ValueError:
        return False
    return True


def _title(text: str) -> bool:
    return any(found.strip("<> ") for found in re.findall(r"<<[^\n]+?>>", text))


def _constrained(text: str) -> bool:
    return choice_present(text, ("My answer is yes.", "My answer is no.", "My answer is maybe."))


def _two_responses(text: str) -> bool:
    parts = paragraphs_of(text, r"\*{6}")
    return len(parts) == 2 and parts[0] != parts[1]


def _repeats(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] == '"'


def _capital_count(text: str, capital_frequency: int, capital_relation: str) -> bool:
    capitals = [word for word in words_of(text) if word.isupper()]
    return compares(len(capitals), capital_frequency, capital_relation)


CHECKS: dict[str, Check] = {
    "keywords:existence": _keywords,
    "keywords:frequency": _keyword_count,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letter_count,
    "length_constraints:number_words": _word_count,
    "length_constraints:number_sentences": _sentence_count,
    "length_constraints:number_paragraphs": _paragraph_count,
    "length_constraints:nth_paragraph_first_word": _paragraph_start,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "detectable_format:constrained_response": _constrained,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeats,
    "startend:end_checker": _ends,
    "startend:quotation": _quoted,
    "change_case:capital_word_frequency": _capital_count,
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:english_lowercase": lambda text: text.islower(),
    "punctuation:no_comma": lambda text: "," not in text,
    "count:capital_words_frequency": capital_words_frequency,
    "format:choice_present": choice_present,
}
