"""Request bodies and answers as plain data."""

from __future__ import annotations

import pytest

from slime_core.engines.protocol import (
    GenerateRequest,
    batch_body,
    disk_update_body,
    error_message,
    generate_body,
    parse_result,
    pause_body,
    tensor_update_body,
)
from slime_core.errors import EngineError


def sglang_answer(**meta) -> dict:
    """As SGLang 0.5.17 writes it."""
    return {
        "text": "12",
        "output_ids": [22, 23],
        "meta_info": {
            "id": "r1",
            "finish_reason": {"type": "stop", "matched": 23},
            "prompt_tokens": 3,
            "weight_version": "v1",
            "num_retractions": 0,
            "input_token_logprobs": [[None, 5, None], [-1.5, 6, None], [-2, 7, None]],
            "output_token_logprobs": [[-0.5, 22, None], [-0.25, 23, None]],
            "output_token_logprobs_length": 2,
            "reasoning_tokens": 0,
            "completion_tokens": 2,
            "cached_tokens": 2,
            "e2e_latency": 0.1,
        }
        | meta,
    }


def test_result():
    result = parse_result(sglang_answer())
    assert (result.tokens, result.log_probs) == ([22, 23], [-0.5, -0.25])
    assert result.prompt_log_probs == [-1.5, -2.0]
    assert (result.finish_type, result.matched) == ("stop", 23)
    assert (result.rid, result.text, result.weight_version) == ("r1", "12", "v1")
    assert (result.prompt_tokens, result.cached_tokens) == (3, 2)
    assert result.meta["e2e_latency"] == 0.1


def test_an_abort_in_the_queue_is_a_result_without_tokens():
    body = sglang_answer(
        finish_reason={"type": "abort", "message": "Abort in waiting queue"},
        output_token_logprobs=[],
    )
    body["output_ids"] = []
    del body["meta_info"]["prompt_tokens"], body["meta_info"]["cached_tokens"]
    result = parse_result(body)
    assert (result.finish_type, result.tokens, result.prompt_tokens) == ("abort", [], 0)


def test_the_middle_of_a_stream_has_no_finish():
    assert parse_result(sglang_answer(finish_reason=None)).finish_type is None


def test_log_probs_of_tokens_that_are_not_given_are_left_out():
    """As SGLang gives them in a stream, and for a prompt that is only scored."""
    ahead = [[-0.5, 22, None], [-0.25, 23, None], [-1.0, 24, None]]
    stream = parse_result(sglang_answer(finish_reason=None, output_token_logprobs=ahead))
    assert (stream.tokens, stream.log_probs) == ([22, 23], [-0.5, -0.25])
    score = parse_result(sglang_answer(output_token_logprobs=ahead[:1]) | {"output_ids": []})
    assert (score.tokens, score.log_probs, score.prompt_log_probs) == ([], [], [-1.5, -2.0])


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        None,
        {"output_ids": [1]},
        sglang_answer(output_token_logprobs=[[-0.5, 22, None]]),
        sglang_answer(output_token_logprobs=[[-0.5, 22, None], [-0.5, 24, None]]),
        sglang_answer(output_token_logprobs=[[-0.5, n, None] for n in (22, 23, 24)]),
        sglang_answer(finish_reason=None, output_token_logprobs=[[-0.5, 22, None]]),
        sglang_answer(output_token_logprobs=[[None, 22, None], [-0.5, 23, None]]),
        sglang_answer(output_token_logprobs=[[], []]),
        sglang_answer(finish_reason="stop"),
    ],
)
def test_answers_that_do_not_add_up_are_errors(body):
    with pytest.raises(EngineError):
        parse_result(body)


def test_bodies():
    request = GenerateRequest([1, 2], {"temperature": 0}, "a", 0, 2, {"priority": 1})
    assert generate_body(request) == {
        "input_ids": [1, 2],
        "sampling_params": {"temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "stream": False,
        "rid": "a",
        "priority": 1,
    }
    body = batch_body([request, GenerateRequest([3], {"n": 1}, "b", extra={"priority": 1})])
    assert body["input_ids"] == [[1, 2], [3]]
    assert body["rid"] == ["a", "b"]
    assert body["logprob_start_len"] == [0, -1]
    assert body["sampling_params"] == [{"temperature": 0}, {"n": 1}]
    assert "rid" not in batch_body([GenerateRequest([1]), GenerateRequest([2])])


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        ([], "at least one"),
        ([GenerateRequest([1], rid="a"), GenerateRequest([1])], "all of its requests or to none"),
        ([GenerateRequest([1], extra={"a": 1}), GenerateRequest([1])], "same extra"),
    ],
)
def test_batches_that_cannot_be_one_call(requests, says):
    with pytest.raises(EngineError, match=says):
        batch_body(requests)


def test_updates_never_abort_and_name_their_flush():
    disk = disk_update_body("/x", "v2", flush_cache=False)
    assert disk["flush_cache"] is False and disk["abort_all_requests"] is False
    tensor = tensor_update_body(["p"], None, True, "flattened_bucket")
    assert tensor["serialized_named_tensors"] == ["p"] and tensor["weight_version"] is None


def test_pause_modes():
    assert pause_body("retract") == {"mode": "retract"}
    with pytest.raises(EngineError, match="abort, retract, in_place"):
        pause_body("stop")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "a"}}, "a"),
        ({"error": "b"}, "b"),
        ({"success": False, "message": "c"}, "c"),
        ({"detail": "d"}, "d"),
        ({"x": 1}, "{'x': 1}"),
        ("plain", "plain"),
    ],
)
def test_error_messages(body, message):
    assert error_message(body) == message
