"""The grader `f1`: overlap of words between response and label, as SQuAD counts it."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from slime_core.rewards.text import after_thinking, label_values

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
CLOSED_ANSWERS = ("yes", "no", "noanswer")


def grade_f1(response: str, label: str, metadata: dict[str, Any]) -> float:
    """The best F1 over the accepted answers, for what follows the reasoning."""
    given = after_thinking(response)
    return max((f1_score(given, one)[0] for one in label_values(label)), default=0.0)


def squad_normalize(text: str) -> str:
    """Lower case without punctuation, articles and doubled spaces."""
    text = ARTICLES.sub(" ", text.lower().translate(PUNCTUATION))
    return " ".join(text.split())


def f1_score(response: str, label: str) -> tuple[float, float, float]:
    """(F1, precision, recall) over words; yes, no and noanswer match only themselves."""
    given, truth = squad_normalize(response), squad_normalize(label)
    if given != truth and (given in CLOSED_ANSWERS or truth in CLOSED_ANSWERS):
        return 0.0, 0.0, 0.0
    words, true_words = given.split(), truth.split()
    common = sum((Counter(words) & Counter(true_words)).values())
    if not common:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(words), common / len(true_words)
    return 2 * precision * recall / (precision + recall), precision, recall
