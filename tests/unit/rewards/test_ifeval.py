import pytest

from slime_core.errors import RewardError
from slime_core.rewards.ifeval import CHECKS, compares, follows, grade_ifeval

# name, arguments, a text that follows, a text that does not
CASES = [
    ("keywords:existence", {"keywords": ["sun", "Moon"]}, "The moon, the sun.", "The sunshine"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a a", "a"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "A Cat."),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 3, "let_relation": "less than"},
        "Eve",
        "eerie",
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at most"},
        "a b c",
        "a b c d",
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "exactly"},
        "One is 1.5 here. Two?",
        "One. Two. Three.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        "a\n\nSo, b",
        "so\n\nb",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x\nP.S. y", "apps"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n** b"),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*a* and **b**",
        "*a* and **",
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1 a Section 2 b",
        "Section 1",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<<>>"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi"}, "say hi\nhi", "hi"),
    ("startend:end_checker", {"end_phrase": "Bye."}, "x bye.", "bye. x"),
    ("startend:quotation", {}, '"x"', '"x'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NASA and ESA",
        "NASA and Esa",
    ),
    ("change_case:english_capital", {}, "ALL 3!", "All"),
    ("change_case:english_lowercase", {}, "all 3!", "All"),
    ("punctuation:no_comma", {}, "a b", "a, b"),
    ("count:capital_words_frequency", {"n": 20, "relation": "around"}, "A " * 22, "A " * 23),
    ("format:choice_present", {"options": ["red", "blue"]}, "I choose red", "I choose green"),
]


@pytest.mark.parametrize(("name", "given", "good", "bad"), CASES, ids=[case[0] for case in CASES])
def test_each_instruction(name, given, good, bad):
    assert follows(good, name, given)
    assert not follows(bad, name, given)
    assert not follows("  ", name, given)


def test_every_instruction_has_a_case():
    assert {case[0] for case in CASES} == set(CHECKS)


def test_all_instructions_must_be_followed():
    metadata = {
        "instruction_id_list": ["punctuation:no_comma", "startend:end_checker"],
        "kwargs": [{"end_phrase": None}, {"end_phrase": "end", "num_words": None}],
    }
    assert grade_ifeval("<think>a, b</think>the end", None, metadata) == 1.0
    assert grade_ifeval("the, end", None, metadata) == 0.0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "needs instruction_id_list"),
        ({"instruction_id_list": ["a"], "kwargs": []}, "same length"),
        ({"instruction_id_list": ["language:response_language"]}, "cannot be checked"),
    ],
)
def test_what_cannot_be_checked_fails_by_name(metadata, message):
    with pytest.raises(RewardError, match=message):
        grade_ifeval("text", None, metadata)


def test_unknown_relations_fail():
    with pytest.raises(RewardError, match="unknown relation 'about'"):
        compares(1, 1, "about")
