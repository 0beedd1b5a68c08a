"""What of a request is read, left to the run, or refused by name."""

import pytest

from slime_core.agents.errors import ApiError
from slime_core.agents.requests import parse_request

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def ask(**more):
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}


def test_messages_become_what_chat_templates_take():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be "},
                                          {"type": "text", "text": "kind"}]},
        {"role": "user", "content": "1+1", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]  # fmt: skip
    found = parse_request(ask(messages=messages, tools=[TOOL], max_tokens=5, stop="x")).messages
    arguments = {"name": "add", "arguments": {"a": 1}}
    assert found == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "1+1", "name": "Ann"},
        {"role": "assistant", "content": "",
         "tool_calls": [{"id": "c1", "type": "function", "function": arguments}]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]  # fmt: skip


def test_an_answer_is_known_again_by_what_it_says_and_not_by_its_spaces_or_ids():
    def digest(content, name="c1", tail="?"):
        call = {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        told = {"role": "assistant", "content": content, "tool_calls": [call]}
        user = {"role": "user", "content": tail}
        return parse_request(ask(messages=[user, told, user])).digest()

    assert digest(" yes\n") == digest("yes", name="other")
    assert digest("yes") != digest("no")
    assert digest("yes", tail="? ") != digest("yes"), "what others say counts letter by letter"


def test_sampling_is_left_to_the_run_and_the_rest_is_without_meaning():
    request = parse_request(ask(temperature=0, top_p=None, user="me", seed=3, max_tokens=7,
                                stream=True, stream_options={"include_usage": True}))  # fmt: skip
    assert request.of_the_run == {"temperature": 0, "seed": 3}
    assert (request.max_tokens, request.stream, request.include_usage) == (7, True, True)
    assert parse_request(ask(tools=[TOOL], tool_choice="none")).tools == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"n": 2}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": ["add"]}, "tools"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": "so"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": 5}, {"role": "user", "content": ""}]},
            "messages[0]",
        ),
        ({"guided_json": {}}, "guided_json"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_name_of_its_field(changes, param):
    with pytest.raises(ApiError) as error:
        parse_request(ask(**changes))
    told = error.value.body()["error"]
    assert (error.value.status, told["param"]) == (400, param)
    assert told["type"] == "invalid_request_error"
