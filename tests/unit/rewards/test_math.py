import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.rewards.gsm8k import grade_gsm8k
from slime_core.rewards.hub import RewardHub, RewardSettings
from slime_core.rewards.math_equiv import equivalent, grade_math_verify
from slime_core.rewards.math_expr import exact_value, same_value
from slime_core.rewards.math_grade import answers_equal, grade_deepscaler, grade_math
from slime_core.rewards.math_text import boxed_content, hendrycks_strip, last_boxed
from slime_core.sample import Sample

EQUAL = [
    ("42", " 42 "),
    ("1,234,567", "1234567"),
    ("1e3", "1000"),
    ("5.0", "5"),
    ("\\frac{1}{2}", "0.5"),
    ("\\frac12", "\\dfrac{1}{2}"),
    ("1/2", "\\tfrac{1}{2}"),
    ("\\frac{1}{4}", "0.25"),
    ("x+1", "1 + x"),
    ("2x", "x+x"),
    ("(x+1)^2", "x^2+2x+1"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}"),
    ("x^{10}", "x^10"),
    ("\\sin^2(x)+\\cos^2(x)", "\\cos^2 x + \\sin^2 x"),
    ("\\text{A}", "A"),
    ("45^\\circ", "45"),
    ("50\\%", "50"),
    ("\\$20", "20"),
    ("x = 5", "5"),
    ("5\\text{ cm}", "5"),
    ("12 \\text{ hours}", "12"),
    ("3 million", "3000000"),
    ("(1, 2)", "(1,2)"),
    ("(\\frac{1}{2}, 3)", "(0.5,3)"),
    ("[0, \\infty)", "[0,\\infty)"),
    ("\\{1,2\\}", "\\{1, 2\\}"),
    ("-\\frac{3}{4}", "-3/4"),
    ("2\\pi r", "2r\\pi"),
    ("\\left(1,2\\right)", "(1,2)"),
]
UNEQUAL = [
    ("42", "43"),
    ("", "42"),
    ("42", ""),
    ("(2,1)", "(1,2)"),
    ("(0,9)", "[0,9)"),
    ("(1,2,3)", "(1,2)"),
    ("\\frac{2}{4}", "\\frac{1}{2}"),
    ("2+3", "5"),
    ("10/2", "5"),
    ("3.14159", "\\pi"),
    ("0.333", "\\frac{1}{3}"),
    ("x", "\\sqrt{x^2}"),
    ("x+1", "x-1"),
    ("east", "seat"),
    ("no idea", "A"),
    ("-5", "5"),
    ("\\frac{1}{0}", "\\frac{2}{0}"),
]


@pytest.mark.parametrize(("given", "truth"), EQUAL)
def test_answers_that_are_equal(given, truth):
    assert answers_equal(given, truth)
    assert grade_math(f"thus \\boxed{{{given}}}.", truth, {}) == 1.0


@pytest.mark.parametrize(("given", "truth"), UNEQUAL)
def test_answers_that_are_not_equal(given, truth):
    assert not answers_equal(given, truth)


@pytest.mark.parametrize(("given", "truth"), [pair for pair in EQUAL if "text" not in pair[0]])
def test_every_normal_form_is_its_own(given, truth):
    for text in (given, truth):
        assert hendrycks_strip(hendrycks_strip(text)) == hendrycks_strip(text)


@given(a=st.integers(-999, 999), b=st.integers(1, 99), c=st.integers(-99, 99))
def test_exact_arithmetic_of_the_parser(a, b, c):
    from fractions import Fraction

    assert exact_value(f"\\frac{{{a}}}{{{b}}} + {c}") == Fraction(a, b) + c
    assert exact_value(f"({a}-{c})\\cdot {b}") == (a - c) * b
    assert exact_value(f"-{b}^2") == -(b**2)
    assert exact_value(f"2^{{-1}}{b}") is None or exact_value(f"2^{{-1}}\\cdot {b}") == Fraction(
        b, 2
    )


@given(st.text(max_size=60))
def test_no_text_breaks_the_parser(text):
    assert same_value(text, text) in (True, False)
    assert answers_equal(text, text) == bool(text.strip())
    assert grade_math_verify(text, "1", {}) in (0.0, 1.0)


BOMBS = [
    "9^{9^{9^{9^{9}}}}",
    "9**9**9**9",
    "1e300" * 50,
    "1e99999999999",
    "100000!",
    "((((" * 500,
    "\\frac" * 100,
    "\\sqrt{" * 200 + "2" + "}" * 200,
    "-" * 5000 + "1",
    "x^" * 100 + "x",
    "__import__('os').system('true')",
    "9" * 100_000,
    "\\boxed{" * 5000,
    "$" * 5000,
    "{" * 20_000 + "}" * 20_000,
    "1," * 5000,
]


@pytest.mark.parametrize("bomb", BOMBS, ids=range(len(BOMBS)))
def test_no_answer_makes_a_grader_slow(bomb):
    start = time.process_time()
    for text in (bomb, f"\\boxed{{{bomb}}}"):
        assert grade_math(text, "41", {}) == 0.0
        assert grade_math_verify(text, "41", {}) == 0.0
        assert grade_gsm8k(text, "41", {}) == 0.0
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{a{b}c} and", "a{b}c"),
        ("\\boxed{1} \\boxed{2}", "2"),
        ("\\fbox{7}", "7"),
        ("\\boxed{1} \\fbox{7}", "1"),
        ("\\boxed 5$ so", "5"),
        ("\\boxed{open", None),
        ("\\boxed{1} \\boxed{open", None),
        ("none", None),
        ("\\boxed{}", ""),
    ],
)
def test_boxes(text, content):
    assert boxed_content(text) == content
    assert (last_boxed(text) is None) == (content is None)


def test_labels_may_be_boxed_or_several():
    assert grade_math("\\boxed{7}", "so \\boxed{7}", {}) == 1.0
    assert grade_math("\\boxed{7}", '["6", "7"]', {}) == 1.0
    assert grade_math("\\boxed{5}", '["6", "7"]', {}) == 0.0
    assert grade_math("\\boxed{[0, 1)}", "[0,1)", {}) == 1.0


def test_deepscaler_reads_only_what_follows_the_reasoning():
    assert grade_deepscaler("\\boxed{7}", "7", {}) == 0.0
    assert grade_deepscaler("\\boxed{7}</think>so \\boxed{8}", "7", {}) == 0.0
    assert grade_deepscaler("x###Response \\boxed{7}", "7", {}) == 1.0


@pytest.mark.parametrize(
    ("gold", "pred", "equal"),
    [
        ("$\\{1,2\\}$", "$2, 1$", True),
        ("$(1,2)$", "$(2,1)$", False),
        ("$x=3$", "$3$", True),
        ("\\boxed{1} and \\boxed{2}", "$\\boxed{2,1}$", True),
        ("0.5", "50%", True),
        ("$\\frac{1}{2}$", "the answer is .5", True),
        ("7", "7 or maybe 8", False),
        ("$1{,}000$", "1000", False),
        ("$10^{3}$", "$1000$", True),
        ("$\\pi$", "$3.14159$", False),
        ("$[1,2] \\cup [3,4]$", "$[1,2]\\cup[3,4]$", True),
    ],
)
def test_free_answers(gold, pred, equal):
    assert equivalent(gold, pred) == equal


def test_bare_latex_is_a_label_too():
    assert grade_math_verify("so $\\frac{1}{2}$", "\\frac{1}{2}", {}) == 1.0


@pytest.mark.parametrize(
    ("response", "label", "right"),
    [
        ("so 18\n#### 18", "18", True),
        ("so #### 1,800.0", "she pays 1,800 #### 1800", True),
        ("18 of 20", "18", False),
        ("it is -3.50", "-3.5", True),
        ("none", "3", False),
    ],
)
def test_last_numbers(response, label, right):
    assert grade_gsm8k(response, label, {}) == float(right)


def test_graders_run_in_the_workers_by_name():
    samples = [
        Sample(response="\\boxed{\\frac12}<|im_end|>", label="0.5", metadata={"rm_type": "math"}),
        Sample(response="Answer: 42", label="42", metadata={"rm_type": "dapo"}),
        Sample(response="it is 7", label="7", metadata={"rm_type": "gsm8k"}),
        Sample(response="The cat", label="a cat", metadata={"rm_type": "f1"}),
    ]

    async def run():
        hub = RewardHub(RewardSettings())
        keyed = RewardHub(RewardSettings(reward_key="score"))
        try:
            plain = [await hub.score(sample) for sample in samples]
            return plain, await keyed.score(samples[1])
        finally:
            await hub.close()
            await keyed.close()

    plain, keyed = asyncio.run(run())
    assert [getattr(result, "number", result) for result in plain if result is not plain[1]] == [
        1
    ] * 3
    assert plain[1].reason == "reward_key"
    assert (keyed.number, keyed.value["pred"]) == (1.0, "42")
