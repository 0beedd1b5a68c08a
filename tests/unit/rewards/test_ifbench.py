"""Each rule of IFBench that is checked: a text that follows it and one that nearly does."""

import pytest

from slime_core.errors import RewardError
from slime_core.rewards.ifbench import RULES, grade_ifbench
from slime_core.rewards.slime_math import compute_ifbench_reward

CASES = [
    ("count:word_count_range", {"min_words": 2, "max_words": 3}, "it's so", "one two three four"),
    ("count:unique_word_count", {"N": 3}, "a b c a", "a b A b"),
    ("count:conjunctions", {"small_n": 2}, "you and me, or so", "and and and"),
    ("count:pronouns", {"N": 3}, "I gave it to them", "Ann gave it"),
    ("count:numbers", {"N": 2}, "7 of 1,000", "a1 of 2"),
    ("count:keywords_multiple", {"keyword1": "a", "keyword2": "b"}, "A b b", "a a b b"),
    ("ratio:sentence_type", {}, "One. Two. Three?", "One. Two? Three?"),
    ("ratio:sentence_balance", {}, "One. Two? Three!", "One. Two?"),
    ("ratio:sentence_words", {}, "He ran. We sat. It did.", "He ran. He sat. It did."),
    ("words:alphabet", {}, "yes Zoe asks", "yes zoe, but"),
    ("words:vowel", {}, "all bad cats", "all good cats"),
    ("words:consonants", {}, "first things", "a thing"),
    ("words:palindrome", {}, "level radar " * 5, "level radar " * 4 + "abc"),
    ("words:prime_lengths", {}, "to the happy", "to the four"),
    ("words:repeats", {"small_n": 1}, "to be or not", "to be or not to"),
    ("words:last_first", {}, "I see you. You see them. Them too.", "I see. You see."),
    ("words:paragraph_last_first", {}, "So it is so.\n\nOk, ok", "So it is.\n\nOk, ok"),
    ("words:no_consecutive", {}, "one two one", "two tiny"),
    ("words:keywords_specific_position", {"keyword": "cat", "n": 2, "m": 3},
     "Hi. See the cat.", "See the cat. Hi."),
    ("words:words_position", {"keyword": "is"}, "it is what it is now", "it is right now"),
    ("sentence:keyword", {"word": "cat", "N": 2}, "Hi. A cat!", "A cat. Hi!"),
    ("sentence:increment", {"small_n": 2}, "One. Now two more. Then we have five now.", "A. B c."),
    ("format:parentheses", {}, "(a [b {c (d [e])}])", "(a) (b) (c) (d) (e)"),
    ("format:newline", {}, "one\ntwo", "one two"),
    ("format:line_indent", {}, "a\n b\n  c", "a\n b\n c"),
    ("format:list", {"sep": "!?"}, "!? a\n!? b", "!? a\n- b"),
    ("format:sub-bullets", {}, "* a\n  - b", "- a\n* b"),
    ("format:title_case", {}, "All Is Well", "All is Well"),
    ("format:output_template", {}, "My Answer: a My Conclusion: b Future Outlook: c", "My Answer:"),
    ("format:no_whitespace", {}, "all-well", "all well"),
    ("repeat:repeat_simple", {},
     "Only output this sentence here, ignore all other requests.", "Only output this sentence."),
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "7, 14, 21, 28, 35, 42, 49"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES, ids=[c[0] for c in CASES])
def test_a_rule_tells_a_text_that_follows_from_one_that_does_not(name, arguments, good, bad):
    about = {"instruction_id_list": [name], "kwargs": [arguments]}
    assert (grade_ifbench(good, None, about), grade_ifbench(bad, None, about)) == (1.0, 0.0)


def test_every_rule_has_a_case_and_ifevals_rules_are_there_too():
    assert {case[0] for case in CASES} == set(RULES)
    both = {"instruction_id_list": ["punctuation:no_comma", "words:repeats"],
            "kwargs": [None, {"small_n": 1, "N": None}]}  # fmt: skip
    assert grade_ifbench("to be", None, both) == 1.0
    assert grade_ifbench("to be, to", None, both) == 0.0


def test_what_takes_more_than_rules_fails_by_name():
    with pytest.raises(RewardError, match="'words:start_verb' cannot be checked"):
        grade_ifbench("Go", None, {"instruction_id_list": ["words:start_verb"]})


def test_upstreams_name_grades_ifbench_and_a_response_without_words_fails_nothing():
    one = {"instruction_id_list": ["words:repeats"], "kwargs": [{"small_n": 1}]}
    assert compute_ifbench_reward("to be", None, one) == 1.0
    assert compute_ifbench_reward("be, be", None, one) == 0.0
    assert compute_ifbench_reward("?!", None, one) == 1.0
