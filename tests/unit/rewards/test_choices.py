import pytest

from slime_core.rewards.choices import chosen_letter, grade_gpqa

ACIDS = {"choices": ["acid", "acetic acid", "base", "salt"]}


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is (B)", "B"),
        ("The correct answer is B.", "B"),
        ("the answer is: **C**", "C"),
        ("Final Answer: $\\boxed{D}$", "D"),
        ("\\boxed{\\text{D}}", "D"),
        ("Answer: A", "A"),
        ("answer is a", "A"),
        ("I think it is hard. The answer is I", "I"),
        ("The answer is C. But no: the answer is D.", "D"),
        ("The answer is not C but D", "D"),
        ("A is wrong, (B) is wrong.\n\nC", "C"),
        ("B) because of the enzyme\nmore\nB", "B"),
        ("(B) is wrong.\nIt is **C**.", "C"),
        ("(C)", "C"),
        ("c.", "C"),
        ("Answer: E", "E"),
        ("no idea", None),
        ("I do not know", None),
        ("The answer is a matter of taste", None),
        ("The answer is unclear. I give up", None),
        ("", None),
        ("Vitamin C is good, plan B failed", None),
    ],
)
def test_chosen_letter(response, letter):
    assert chosen_letter(response) == letter


@pytest.mark.parametrize(
    ("response", "label", "metadata", "right"),
    [
        # Three faults that were measured in slime's grader.
        ("The answer is (B)", "B", {}, True),
        ("no idea", "A", {}, False),
        ("Answer: E", "A", ACIDS, False),
        # Letters against labels in their forms.
        ("Answer: b", "(B)", {}, True),
        ("Answer: B", "acetic acid", ACIDS, True),
        ("Answer: B", "C", {"correct_letter": "B"}, True),
        ("Answer: C", "B", {"valid_letters": ["A", "B"]}, False),
        ("Answer: B", "x", {"choices": {"B": "x", "A": "y"}}, True),
        ("<think>The answer is A</think>Answer: B", "B", {}, True),
        # Words instead of letters.
        ("It must be acetic acid.", "acetic acid", ACIDS, True),
        ("It must be acetic acid.", "B", ACIDS, True),
        ("It must be acetic acid.", "A", ACIDS, False),
        ("Either salt or acetic acid.", "B", ACIDS, False),
        ("It is a basement", "C", ACIDS, False),
        ("It is paris", "Paris", {}, True),
        ("A long text with letters", "A", {}, False),
    ],
)
def test_grades(response, label, metadata, right):
    assert grade_gpqa(response, label, metadata) == float(right)
