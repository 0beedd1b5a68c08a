import json
from pathlib import Path

import pytest

from slime_core.data.buffer import FILTERS, GroupBuffer, filter_of_user
from slime_core.data.sources import PromptSource, SourceSettings
from slime_core.errors import PluginError
from slime_core.sample import Sample, Status

VECTORS = Path(__file__).parents[2] / "vectors" / "numeric.jsonl"
CASES = [row for row in map(json.loads, VECTORS.open()) if row["fn"] == "buffer_first"]


def group(*rewards, prompt="p", **fields):
    return [Sample(prompt=prompt, reward=reward, **fields) for reward in rewards]


def buffer_of(groups, select=None):
    buffer = GroupBuffer(source=None, select=select)
    buffer.add_samples(groups)
    return buffer


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_vector_of_the_order(case, tmp_path):
    given, expected = case["input"], case["expected"]
    path = tmp_path / "p.jsonl"
    rows = [json.dumps({"input": f"p{n}"}) for n in range(given["n_prompts"])]
    path.write_text("\n".join(rows))
    source = PromptSource(
        str(path), SourceSettings(n_samples_per_prompt=given["n_samples_per_prompt"])
    )
    buffer = GroupBuffer(source)
    groups = buffer.get_samples(3)
    buffer.add_samples([groups[2], groups[0]])
    found = buffer.get_samples(3)
    assert [group[0].prompt for group in found] == expected["prompts"]
    assert [group[0].group_index for group in found] == expected["group_index"]
    assert len(buffer) == expected["buffer_left"]
    assert source.state()["position"] == expected["offset"]


GROUPS = [
    group(0.0, 0.0, prompt="a"),
    group(1.0, 1.0, prompt="b"),
    group(None, None, prompt="b", status=Status.ABORTED),
    group(1.0, 0.0, prompt="a"),
    group(1.0, 0.5, prompt="c", status=Status.FAILED),
]


@pytest.mark.parametrize(
    ("name", "picked", "left"),
    [
        ("fifo", [0, 1, 2], [3, 4]),
        ("prioritized", [1, 4, 3], [0, 2]),
        ("quality", [0, 1, 2], [3]),
        ("stratified", [0, 3, 1], [2, 4]),
        ("diversity", [0, 1, 4], [2, 3]),
    ],
)
def test_ready_filters(name, picked, left):
    buffer = buffer_of(GROUPS, FILTERS[name])
    assert [GROUPS.index(one) for one in buffer.take(3)] == picked
    assert [GROUPS.index(one) for one in buffer.groups] == left


@pytest.mark.parametrize("name", FILTERS)
def test_no_filter_gives_more_than_there_is(name):
    buffer = buffer_of(GROUPS[:2], FILTERS[name])
    assert len(buffer.take(9)) == 2 and not buffer.groups
    assert buffer.take(1) == []


def upstream_form(args, rollout_id, buffer, num_samples):
    assert rollout_id is None and args == "args"
    picked = buffer[-num_samples:]
    del buffer[-num_samples:]
    return picked


def seed_form(args, buffer, num_samples):
    return list(reversed(buffer))[:num_samples]


@pytest.mark.parametrize("function", [upstream_form, seed_form])
def test_what_a_users_filter_returns_is_consumed_whether_it_removes_it_or_not(function):
    buffer = buffer_of(GROUPS, filter_of_user(function, "args"))
    assert sorted(GROUPS.index(one) for one in buffer.take(2)) == [3, 4]
    assert [GROUPS.index(one) for one in buffer.groups] == [0, 1, 2]


@pytest.mark.parametrize(
    "function", [lambda args, buffer, n: buffer, lambda args, buffer, n: [group(1.0)]]
)
def test_a_filter_that_gives_too_many_or_strangers_is_refused(function):
    buffer = buffer_of(GROUPS, filter_of_user(function, None))
    with pytest.raises(PluginError, match="must pick from the groups"):
        buffer.take(2)
