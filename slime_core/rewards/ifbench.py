"""The grader `ifbench`: IFEval's instructions and those of IFBench (Pyatkin et al. 2025) that plain
rules can check. Instructions that take a language model, a dictionary or a list of names fail the
sample by name."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import Any

from slime_core.rewards.ifeval import CHECKS, Check, grade_with, paragraphs_of, sentences_of

CONJUNCTIONS = {"and", "but", "for", "nor", "or", "so", "yet"}
PRONOUNS = {
    "i", "me", "my", "mine", "myself", "we", "us", "our", "ours", "ourselves", "you", "your",
    "yours", "yourself", "yourselves", "he", "him", "his", "himself", "she", "her", "hers",
    "herself", "it", "its", "itself", "they", "them", "their", "theirs", "themselves", "this",
    "that", "these", "those", "who", "whom", "whose", "which", "what",
}  # fmt: skip
TEMPLATE = ("My Answer:", "My Conclusion:", "Future Outlook:")
ONLY_SENTENCE = "Only output this sentence here, ignore all other requests."
TIMES = (1, 2, 3, 5, 7)
PALINDROMES, PALINDROME_LETTERS, DEPTH = 10, 5, 5


def grade_ifbench(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 where all instructions are followed. Raises as ifeval.grade_ifeval."""
    return grade_with({**CHECKS, **RULES}, response, metadata)


def words_of(text: str) -> list[str]:
    """Words in small letters, with the apostrophes and hyphens inside them."""
    return re.findall(r"\w+(?:['’-]\w+)*", text.lower())  # noqa: RUF001


def _ends(text: str) -> Counter[str]:
    """How often sentences end in each of . ? !"""
    return Counter(re.findall(r"[.?!](?=[\"')\]]*(?:\s|$))", text))


def _balanced(text: str) -> bool:
    ends = _ends(text)
    return bool(ends) and ends["."] == ends["?"] == ends["!"]


def _two_to_one(text: str) -> bool:
    ends = _ends(text)
    return ends["?"] > 0 and ends["."] == 2 * ends["?"]


def _numbers(text: str, N: int) -> bool:
    return len(re.findall(r"(?<![\w.])\d+(?:[.,]\d+)*", text)) == N


def _alphabet(text: str) -> bool:
    letters = [word[0] for word in words_of(text)]
    steps = ((ord(b) - ord(a)) % 26 for a, b in pairwise(letters))
    return all("a" <= letter <= "z" for letter in letters) and all(step == 1 for step in steps)


def _clusters(text: str) -> bool:
    cluster = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")
    return all(cluster.search(word) for word in words_of(text))


def _palindromes(text: str) -> bool:
    found = [w for w in words_of(text) if len(w) >= PALINDROME_LETTERS and w == w[::-1]]
    return len(found) >= PALINDROMES


def _nested(text: str) -> bool:
    depth = deepest = 0
    for letter in text:
        depth = max(0, depth + (letter in "([{") - (letter in ")]}"))
        deepest = max(deepest, depth)
    return deepest >= DEPTH


def _prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


def _equal_sentences(text: str) -> bool:
    parts = sentences_of(text)
    sets = [set(words_of(part)) for part in parts]
    lengths = {len(part.strip()) for part in parts}
    return len(parts) == 3 and len(lengths) == 1 and sum(map(len, sets)) == len(set().union(*sets))


def _keyword_in_sentence(text: str, word: str, N: int) -> bool:
    parts = sentences_of(text)
    return 1 <= N <= len(parts) and word.lower() in words_of(parts[N - 1])


def _keyword_place(text: str, keyword: str, n: int, m: int) -> bool:
    parts = sentences_of(text)
    words = words_of(parts[n - 1]) if 1 <= n <= len(parts) else []
    return 1 <= m <= len(words) and words[m - 1] == keyword.lower()


def _second_and_last_but_one(text: str, keyword: str) -> bool:
    words = words_of(text)
    return len(words) > 1 and words[1] == words[-2] == keyword.lower()


def _chained(text: str) -> bool:
    parts = [words_of(part) for part in sentences_of(text)]
    return all(before and after and before[-1] == after[0] for before, after in pairwise(parts))


def _ringed(text: str) -> bool:
    parts = [words_of(part) for part in paragraphs_of(text, r"\n\s*\n")]
    return all(words and words[0] == words[-1] for words in parts)


def _growing(text: str, small_n: int) -> bool:
    counts = [len(words_of(part)) for part in sentences_of(text)]
    return all(after - before == small_n for before, after in pairwise(counts))


def _stairs(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in lines]
    return all(after > before for before, after in pairwise(indents))


def _sub_bullets(text: str) -> bool:
    marks = re.findall(r"^\s*([*-])\s+\S", text, re.MULTILINE)
    return "*" in marks and bool(re.search(r"\*-", "".join(marks)))


def _each_more_often(text: str, **keywords: str) -> bool:
    counts, words = Counter(words_of(text)), [keywords[name] for name in sorted(keywords)]
    pairs = zip(words, TIMES, strict=False)
    return all(counts[word.lower()] == wanted for word, wanted in pairs)


def _multiples(text: str) -> bool:
    return re.findall(r"\d+", text) == [str(number) for number in range(14, 50, 7)]


RULES: dict[str, Check] = {
    "count:word_count_range": lambda text, min_words, max_words: (
        min_words <= len(words_of(text)) <= max_words),
    "count:unique_word_count": lambda text, N: len(set(words_of(text))) >= N,
    "count:conjunctions": lambda text, small_n: len(CONJUNCTIONS & set(words_of(text))) >= small_n,
    "count:pronouns": lambda text, N: sum(word in PRONOUNS for word in words_of(text)) >= N,
    "count:numbers": _numbers,
    "count:keywords_multiple": _each_more_often,
    "ratio:sentence_type": _two_to_one,
    "ratio:sentence_balance": _balanced,
    "ratio:sentence_words": _equal_sentences,
    "words:alphabet": _alphabet,
    "words:vowel": lambda text: len(set("aeiou") & set(text.lower())) <= 1,
    "words:consonants": _clusters,
    "words:palindrome": _palindromes,
    "words:prime_lengths": lambda text: all(_prime(len(word)) for word in words_of(text)),
    "words:repeats": lambda text, small_n: (
        max(Counter(words_of(text)).values(), default=0) <= small_n
    ),
    "words:last_first": _chained,
    "words:paragraph_last_first": _ringed,
    "words:no_consecutive": lambda text: all(a[0] != b[0] for a, b in pairwise(words_of(text))),
    "words:keywords_specific_position": _keyword_place,
    "words:words_position": _second_and_last_but_one,
    "sentence:keyword": _keyword_in_sentence,
    "sentence:increment": _growing,
    "format:parentheses": _nested,
    "format:newline": lambda text: all(len(line.split()) == 1 for line in text.split("\n")),
    "format:line_indent": _stairs,
    "format:list": lambda text, sep: (
        sum(line.lstrip().startswith(sep) for line in text.splitlines()) > 1),
    "format:sub-bullets": _sub_bullets,
    "format:title_case": lambda text: all(w[0].isupper() for w in re.findall(r"[^\W\d_]+", text)),
    "format:output_template": lambda text: all(part in text for part in TEMPLATE),
    "format:no_whitespace": lambda text: not re.search(r"\s", text),
    "repeat:repeat_simple": lambda text: text.strip() == ONLY_SENTENCE,
    "custom:multiples": _multiples,
}  # fmt: skip
