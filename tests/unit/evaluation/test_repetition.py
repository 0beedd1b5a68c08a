import json
import random
from pathlib import Path

import pytest

from slime_core.evaluation.repetition import has_repetition

VECTORS = Path(__file__).parents[2] / "vectors" / "edge_cases.jsonl"
CASES = [row for row in map(json.loads, VECTORS.open(encoding="utf-8")) if row["kind"] == "metric"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_vectors(case):
    letters, times = case["input"]["text"].split("*")
    assert has_repetition(letters.strip('"') * int(times)) == case["expected"]


def test_only_long_texts_that_repeat_count():
    words = random.Random(0).choices([f"word{n}" for n in range(3000)], k=4000)
    prose = " ".join(words)
    assert len(prose) > 20_000
    assert not has_repetition(prose)
    assert has_repetition("ab" * 6000)
    assert not has_repetition("ab" * 5000)
    assert has_repetition(prose + "again " * 2000)
    assert not has_repetition("again " * 2000 + prose)
