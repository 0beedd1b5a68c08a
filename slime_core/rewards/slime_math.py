"""Graders under the names and signatures that slime gives them, for plug-ins that call them."""

from __future__ import annotations

from typing import Any

from slime_core.rewards.choices import grade_gpqa
from slime_core.rewards.dapo import dapo_score
from slime_core.rewards.ifbench import grade_ifbench
from slime_core.rewards.math_grade import answers_equal, grade_deepscaler, grade_math
from slime_core.rewards.math_text import boxed_content


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False
) -> dict[str, Any]:
    """DAPO's {"score": 1.0 or -1.0, "acc", "pred"}."""
    return dapo_score(solution_str, str(ground_truth), strict_box=strict_box_verify)


def get_deepscaler_rule_based_reward(response: str, label: Any) -> float:
    """1.0 for a right answer behind the thinking, else 0.0."""
    return grade_deepscaler(response, str(label), {})


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Whether the boxed answer of a solution is right."""
    return grade_math(solution_str, str(ground_truth), {}) == 1.0


def extract_answer(passage: str) -> str | None:
    """What stands in the last box."""
    return boxed_content(passage)


def grade_answer_sympy(given_answer: str, ground_truth: Any) -> bool:
    """Whether an answer equals the truth as mathematics."""
    return answers_equal(str(given_answer), str(ground_truth))


def compute_gpqa_reward(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1.0 for the right letter, else 0.0."""
    return grade_gpqa(response, str(label), metadata or {})


def compute_ifbench_reward(
    response: str, label: Any, metadata: dict[str, Any] | None = None
) -> float:
    """1.0 where every instruction of the metadata is followed."""
    return grade_ifbench(response, None if label is None else str(label), metadata or {})
