import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.data.render import prompt_to_messages
from slime_core.data.sources import PromptSource, SourceSettings, epoch_permutation
from slime_core.errors import DataError
from slime_core.sample import Status

VECTORS = Path(__file__).parents[2] / "vectors"
ROWS = [
    json.loads(line)
    for name in ("edge_cases.jsonl", "numeric.jsonl")
    for line in (VECTORS / name).open(encoding="utf-8")
]


def source_of(folder, rows, tokenizer=None, **settings):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptSource(str(path), SourceSettings(**settings), tokenizer)


def prompts(groups):
    return [group[0].prompt for group in groups]


class Words:
    """A tokenizer of words, with a template that shows everything it was given."""

    chat_template = "shown"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, tools, **kwargs):
        assert not tokenize
        if kwargs.pop("refuse", False):
            raise ValueError("roles must alternate")
        text = " ".join(f"{item['role']}: {item['content']}" for item in messages)
        names = "".join(f" tool:{tool['name']}" for tool in tools or [])
        marks = "".join(f" {key}={value}" for key, value in kwargs.items())
        return text + names + marks + (" assistant:" if add_generation_prompt else "")

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [len(word) for word in text.split()]


def test_groups_carry_ids_prompt_label_and_metadata_of_their_own(tmp_path):
    rows = [{"q": "a", "l": "1", "m": {"k": [1]}}, {"q": "b", "l": 2}]
    source = source_of(
        tmp_path, rows, input_key="q", label_key="l", metadata_key="m", n_samples_per_prompt=2
    )
    first, second = source.get_samples(2)
    assert [(s.group_index, s.index) for s in first + second] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert [(s.prompt, s.label, s.status) for s in first] == [("a", "1", Status.PENDING)] * 2
    assert (second[0].label, second[0].metadata) == ("2", {})
    first[0].metadata["k"].append(2)
    assert first[1].metadata == {"k": [1]}


@pytest.mark.parametrize("shuffle", [False, True])
@given(size=st.integers(1, 7), takes=st.lists(st.integers(0, 20), max_size=6))
def test_every_pass_holds_each_prompt_once_over_any_wrap(shuffle, size, takes, tmp_path_factory):
    rows = [{"input": str(i)} for i in range(size)]
    source = source_of(tmp_path_factory.mktemp("d"), rows, rollout_shuffle=shuffle)
    drawn = [draw for count in takes for draw in source.draw(count)]
    assert [draw.group_index for draw in drawn] == list(range(sum(takes)))
    places = [(draw.data_epoch, draw.position) for draw in drawn]
    assert places == [divmod(i, size) for i in range(sum(takes))]
    for epoch in range(sum(takes) // size):
        seen = sorted(d.samples[0].prompt for d in drawn if d.data_epoch == epoch)
        assert seen == sorted(str(i) for i in range(size))


@given(before=st.integers(0, 17), after=st.integers(0, 17))
def test_a_restored_source_continues_as_if_never_stopped(before, after, tmp_path_factory):
    folder = tmp_path_factory.mktemp("d")
    rows = [{"input": str(i)} for i in range(5)]
    options = {"rollout_shuffle": True, "rollout_seed": 3, "n_samples_per_prompt": 2}
    whole = source_of(folder, rows, **options).draw(before + after)
    source = source_of(folder, rows, **options)
    drawn = source.draw(before)
    state = json.loads(json.dumps(drawn[-1].state_after if drawn else source.state()))
    resumed = source_of(folder, rows, **options)
    resumed.restore(state)
    assert drawn + resumed.draw(after) == whole


def test_any_draw_can_be_made_again_without_moving_the_source(tmp_path):
    source = source_of(tmp_path, [{"input": str(i)} for i in range(5)], rollout_shuffle=True)
    draws = source.draw(12)
    state = source.state()
    draw = draws[7]
    assert source.group_of(draw.data_epoch, draw.position, draw.group_index) == draw.samples
    assert source.state() == state


def test_a_changed_file_is_refused_at_restore(tmp_path):
    state = source_of(tmp_path, [{"input": "a"}]).state()
    with pytest.raises(DataError, match=r"prompts\.jsonl are not those of the saved run"):
        source_of(tmp_path, [{"input": "b"}]).restore(state)


@pytest.mark.parametrize(
    "case", [row for row in ROWS if row["fn"] == "epoch_permutation"], ids=lambda row: row["id"]
)
def test_permutation_vectors(case):
    given = case["input"]
    assert epoch_permutation(given["n"], given["seed"], given["epoch"]) == case["expected"]


def test_shuffling_leaves_the_global_generator_alone(tmp_path):
    random.seed(5)
    expected = random.Random(5).random()
    source_of(tmp_path, [{"input": "a"}, {"input": "b"}], rollout_shuffle=True).draw(5)
    assert random.random() == expected


@pytest.mark.parametrize(
    "case", [row for row in ROWS if row["fn"] == "prompt_to_messages"], ids=lambda row: row["id"]
)
def test_message_vectors(case):
    assert prompt_to_messages(case["input"]["prompt"]) == case["expected"]


def test_missing_key_names_the_keys_file_and_row(tmp_path):
    with pytest.raises(DataError, match=r"prompts\.jsonl, line 2: no key 'input'.*has prompt, x"):
        source_of(tmp_path, [{"input": "a"}, {"prompt": "b", "x": 1}])
    with pytest.raises(DataError, match="no key 'label'"):
        source_of(tmp_path, [{"input": "a"}], label_key="label")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": ""}, "is empty"),
        ({"input": None}, "is empty"),
        ({"input": []}, "is empty"),
        ({"input": 7}, "text or a list of messages, not int"),
        ({"input": [{"content": "x"}]}, "message 1 of the prompt needs `role`"),
        ({"input": "a", "metadata": "x"}, "'metadata' must be an object, not str"),
        ({"input": "a", "tools": "[{"}, "tools are not valid JSON"),
        ({"input": "a", "tools": [1]}, "list of objects"),
    ],
)
def test_rows_that_cannot_be_prompts(row, message, tmp_path):
    rows = [{"input": "good"}, row]
    with pytest.raises(DataError, match=f"line 2: .*{message}"):
        source_of(tmp_path, rows)
    assert source_of(tmp_path, rows, max_bad_rows=1).counts == {
        "rows": 1,
        "blank": 0,
        "bad": 1,
        "too_long": 0,
    }


def test_template_gets_messages_tools_and_kwargs(tmp_path):
    rows = [{"input": "hi", "tools": json.dumps([{"name": "calc"}])}]
    source = source_of(
        tmp_path,
        rows,
        Words(),
        apply_chat_template=True,
        apply_chat_template_kwargs={"enable_thinking": False},
    )
    ((sample,),) = source.get_samples(1)
    assert sample.prompt == "user: hi tool:calc enable_thinking=False assistant:"
    assert sample.metadata["tools"] == [{"name": "calc"}]
    assert sample.apply_chat_template_kwargs == {"enable_thinking": False}


def test_messages_without_template_stay_messages(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    ((sample,),) = source_of(tmp_path, [{"input": messages}]).get_samples(1)
    assert sample.prompt == messages


def test_a_template_that_refuses_names_the_row(tmp_path):
    options = {"apply_chat_template": True, "apply_chat_template_kwargs": {"refuse": True}}
    source = source_of(tmp_path, [{"input": "a"}], Words(), **options)
    with pytest.raises(DataError, match=r"prompts\.jsonl, row 1: .*ValueError: roles must"):
        source.get_samples(1)


def test_template_is_needed_when_asked_for(tmp_path):
    plain = Words()
    plain.chat_template = None
    source = source_of(tmp_path, [{"input": "a"}], plain, apply_chat_template=True)
    with pytest.raises(DataError, match="no chat template; drop --apply-chat-template"):
        source.get_samples(1)
    with pytest.raises(DataError, match="needs a tokenizer"):
        source_of(tmp_path, [{"input": "a"}], apply_chat_template=True)


def test_length_filter_counts_rendered_tokens_and_keeps_the_order(tmp_path):
    rows = [{"input": "w " * n} for n in (3, 1, 9, 2, 8)]
    options = {"apply_chat_template": True, "rollout_max_prompt_len": 5}
    source = source_of(tmp_path, rows, Words(), **options)
    assert [len(text.split()) - 2 for text in prompts(source.get_samples(3))] == [3, 1, 2]
    assert source.counts["too_long"] == 2
    with pytest.raises(DataError, match="all 5 prompts are longer than"):
        source_of(tmp_path, rows, Words(), **options | {"rollout_max_prompt_len": 2})


def test_media_take_the_places_of_their_marks(tmp_path):
    row = {"input": "see <image> and <image>!", "pics": ["a.png", "b.png"]}
    options = {"multimodal_keys": {"image": "pics"}}
    ((sample,),) = source_of(tmp_path, [row], **options).get_samples(1)
    assert sample.prompt[0]["content"] == [
        {"type": "text", "text": "see "},
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": " and "},
        {"type": "image", "image": "b.png"},
        {"type": "text", "text": "!"},
    ]
    assert sample.multimodal_inputs == {"images": ["a.png", "b.png"]}
    for count in (1, 3):
        source = source_of(tmp_path, [row | {"pics": ["x"] * count}], **options)
        with pytest.raises(DataError, match=r"row 1: .*<image>"):
            source.get_samples(1)


def test_labels_become_text(tmp_path):
    rows = [{"input": "a", "label": label} for label in ("x", 42, 4.5, True, ["a", "é"], None)]
    source = source_of(tmp_path, rows, label_key="label")
    labels = [group[0].label for group in source.get_samples(6)]
    assert labels == ["x", "42", "4.5", "true", '["a", "é"]', None]
