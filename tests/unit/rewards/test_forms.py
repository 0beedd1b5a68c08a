"""Graders of forms: regular expressions, JSON schemas, programs with tests, reasoning-gym."""

import asyncio
import json

import psutil
import pytest

from slime_core.check.plugins import check_grader
from slime_core.errors import ConfigError, RewardError
from slime_core.rewards import reasoning
from slime_core.rewards.code import grade_code, grade_code_share, program_of
from slime_core.rewards.hub import RewardHub, RewardSettings
from slime_core.rewards.patterns import grade_json_schema, grade_regex
from slime_core.rewards.reasoning import grade_reasoning_gym
from slime_core.rewards.registry import GRADERS
from slime_core.sample import Sample
from tests.unit.tools.test_sandbox import boxed

AREA = {
    "type": "object", "required": ["city"], "additionalProperties": False,
    "properties": {"city": {"type": "string"}, "people": {"type": "integer", "minimum": 0}},
}  # fmt: skip


def test_a_pattern_is_found_anywhere_unless_it_says_where():
    assert grade_regex("so it is 42.", r"\b\d+\b", {}) == 1.0
    assert grade_regex("so it is 42.", r"^\d+$", {}) == 0.0
    assert grade_regex("b", "a", {"pattern": "b"}) == 1.0, "metadata goes first"
    for pattern, words in (("(", "no regular expression"), (None, "needs a pattern")):
        with pytest.raises(RewardError, match=words):
            grade_regex("x", pattern, {})


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ('{"city": "Ulm", "people": 5}', 1.0),
        ('<think>{"city": 1}</think>Here:\n```json\n{"city": "Ulm"}\n```\nDone.', 1.0),
        ('{"city": "Ulm", "people": -1}', 0.0),
        ('{"city": "Ulm", "river": "Danube"}', 0.0),
        ('{"people": 5}', 0.0),
        ("Ulm", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_json_is_held_against_its_schema(response, score):
    assert grade_json_schema(response, json.dumps(AREA), {}) == score
    assert grade_json_schema(response, None, {"schema": AREA}) == score


@pytest.mark.parametrize(
    ("schema", "words"),
    [("{", "not JSON"), (None, "needs a schema"), ({"type": "circle"}, "the schema is none")],
)
def test_a_schema_that_is_none_is_no_score(schema, words):
    with pytest.raises(RewardError, match=words):
        grade_json_schema("{}", None, {"schema": schema})


def test_a_schema_elsewhere_is_not_fetched():
    from referencing.exceptions import Unresolvable

    with pytest.raises(Unresolvable):
        grade_json_schema("{}", None, {"schema": {"$ref": "http://127.0.0.1:9/schema.json"}})


def test_the_last_block_of_a_response_is_its_program():
    text = "<think>```python\nno\n```</think>First:\n```\nold\n```\nbetter:\n```python\nnew\n```\n"
    assert program_of(text) == "new\n"
    assert program_of("print(1)") == "print(1)"


DOUBLE = "```python\nprint(2 * int(input()))\n```"
ADD = "def add(a, b):\n    return a + b"


@boxed
@pytest.mark.parametrize(
    ("response", "tests", "score"),
    [
        (DOUBLE, [{"input": "2", "output": "4"}, {"input": "5\n", "output": "10 \n\n"}], 1.0),
        (DOUBLE, {"inputs": ["2", "3"], "outputs": ["4", "7"]}, 0.5),
        (ADD, "assert add(1, 2) == 3", 1.0),
        (ADD, "assert add(1, 2) == 4", 0.0),
        (ADD + "\nimport os; os._exit(0)", "assert add(1, 2) == 4", 0.0),
        (ADD + "\nraise SystemExit", "assert add(1, 2) == 4", 0.0),
        (ADD, {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 8]}, 0.5),
        ("class Solution:\n    def pair(self, x):\n        return x, x",
         {"fn_name": "pair", "inputs": [[1]], "outputs": [[1, 1]]}, 1.0),
        ("while True: pass", [{"input": "", "output": ""}], 0.0),
        ("this is no program", [{"input": "", "output": ""}], 0.0),
    ],
)  # fmt: skip
def test_a_program_is_worth_the_tests_it_passes(response, tests, score):
    limit = {"time_limit_s": 1 if "while" in response else 10}
    about = {"tests": tests, **limit}
    assert grade_code_share(response, None, about) == score
    assert grade_code(response, None, about) == float(score == 1.0)
    if not isinstance(tests, str):
        assert grade_code(response, json.dumps(tests), limit) == float(score == 1.0)


@boxed
def test_an_entry_point_is_checked_by_the_tests_own_function():
    tests = "def check(candidate):\n    assert candidate(1, 2) == 3"
    assert grade_code(ADD, tests, {"entry_point": "add"}) == 1.0
    assert grade_code(ADD.replace("+", "-"), tests, {"entry_point": "add"}) == 0.0


@pytest.mark.parametrize("tests", [None, "", [], {"inputs": []}, [{"in": 1}]])
def test_code_without_tests_cannot_be_graded(tests):
    with pytest.raises(RewardError, match="code needs tests"):
        grade_code("print(1)", None, {"tests": tests})


def test_reasoning_gym_scores_its_own_tasks():
    entry = __import__("reasoning_gym").create_dataset("leg_counting", size=1, seed=1)[0]
    for metadata in (entry["metadata"], entry):
        assert grade_reasoning_gym(f"hm <answer>{entry['answer']}</answer>", entry["answer"],
                                   dict(metadata)) == 1.0  # fmt: skip
    assert grade_reasoning_gym("no idea", entry["answer"], entry["metadata"]) < 0.1
    with pytest.raises(RewardError, match="no task 'counting_stars'"):
        grade_reasoning_gym("1", "1", {"source_dataset": "counting_stars"})
    with pytest.raises(RewardError, match="source_dataset"):
        grade_reasoning_gym("1", "1", {})


def test_what_a_grader_lacks_is_said_before_a_run(monkeypatch):
    monkeypatch.setattr(reasoning.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"slime-flow\[reasoning\]"):
        check_grader("reasoning_gym")
    assert {"regex", "json_schema", "code", "code_share", "reasoning_gym"} <= set(GRADERS)


@boxed
def test_programs_are_graded_in_worker_processes_and_a_late_one_leaves_nothing():
    async def body(response, timeout_s):
        hub = RewardHub(RewardSettings(rm_type="code", reward_timeout_s=timeout_s))
        try:
            return await hub.score(Sample(response=response, label="assert add(1, 2) == 3"))
        finally:
            await hub.close()

    before = set(psutil.Process().children(recursive=True))  # of other tests
    assert asyncio.run(body(f"```python\n{ADD}\n```<|im_end|>", 30.0)).value == 1.0
    late = asyncio.run(body("import time; time.sleep(60)", 2.0))
    assert late.reason == "timeout"
    assert set(psutil.Process().children(recursive=True)) <= before


@boxed
@pytest.mark.parametrize("peek", ["sys.stdin.read()", "open('/main.py').read()"])
def test_a_program_does_not_find_the_wanted_value_beside_it(peek):
    thief = f"import sys, re, os\ntext = {peek}\nprint(*re.findall('3333', text))\nos._exit(0)"
    about = {"tests": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3333]}}
    assert grade_code(thief, None, about) == 0.0
    honest = "def add(a, b):\n    print('adding')\n    return 3333"
    assert grade_code(honest, None, about) == 1.0
