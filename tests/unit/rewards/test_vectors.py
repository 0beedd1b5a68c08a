"""The shared reward vectors; rows marked `quirk` count only where they say what is preferred."""

import json
from pathlib import Path

import pytest

from slime_core.rewards.choices import grade_gpqa
from slime_core.rewards.dapo import dapo_normalize, dapo_score
from slime_core.rewards.gsm8k import grade_gsm8k, grade_gsm8k_flexible, grade_gsm8k_strict
from slime_core.rewards.ifeval import capital_words_frequency, choice_present
from slime_core.rewards.math_equiv import equivalent
from slime_core.rewards.math_grade import grade_deepscaler, grade_hendrycks_math, grade_math
from slime_core.rewards.math_text import hendrycks_strip, last_boxed
from slime_core.rewards.qa import f1_score, grade_f1, squad_normalize
from slime_core.rewards.text import strip_end_tokens

VECTORS = Path(__file__).parents[2] / "vectors" / "rewards.jsonl"
ROWS = [json.loads(line) for line in VECTORS.open(encoding="utf-8")]


def plainly(grade):
    return lambda given: grade(given["response"], str(given["label"]), given.get("metadata") or {})


FUNCTIONS = {
    "rm_math": plainly(grade_math),
    "rm_deepscaler": plainly(grade_deepscaler),
    "hendrycks_math": plainly(grade_hendrycks_math),
    "rm_dapo": lambda given: dapo_score(
        strip_end_tokens(given["response"]), given["label"], strict_box=given["strict_box"]
    ),
    "rm_gpqa": plainly(grade_gpqa),
    "rm_f1": lambda given: f1_score(given["response"], given["label"]),
    "f1_best_of_labels": lambda given: grade_f1(given["response"], json.dumps(given["labels"]), {}),
    "gsm8k_strict": plainly(grade_gsm8k_strict),
    "gsm8k_flexible": plainly(grade_gsm8k_flexible),
    "gsm8k_signed": plainly(grade_gsm8k),
    "math_verify_equiv": lambda given: equivalent(given["gold"], given["pred"], given["extract"]),
    "hendrycks_strip": lambda given: hendrycks_strip(given["text"]),
    "dapo_normalize": lambda given: dapo_normalize(given["text"]),
    "last_boxed": lambda given: last_boxed(given["text"]),
    "squad_normalize": lambda given: squad_normalize(given["text"]),
    "capital_words_frequency": lambda given: capital_words_frequency(
        given["text"], given["n"], given["relation"]
    ),
    "choice_present": lambda given: choice_present(given["text"], given["options"]),
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['id']}-{row['fn']}")
def test_vector(row):
    if row.get("quirk") and "preferred" not in row:
        pytest.skip(f"a disputable choice of the source: {row['note']}")
    expected = row.get("preferred", row["expected"])
    found = FUNCTIONS[row["fn"]](row["input"])
    if isinstance(expected, list):
        assert found == pytest.approx(expected, abs=1e-8)
    else:
        assert found == expected
