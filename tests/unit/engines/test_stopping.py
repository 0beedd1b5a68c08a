"""Ends of samples, what the text shows of them, and the JSON of answers."""

from __future__ import annotations

import pytest

from slime_core.engines.embedded.answers import answer
from slime_core.engines.embedded.request import LogProbAsk, Request
from slime_core.engines.embedded.sampling_params import SamplingParams
from slime_core.engines.embedded.stopping import StopRules, visible_text

END = 0
LETTERS = dict(enumerate(["", "ab", "c", "bc", "d", "\ufffd"]))


def decode(tokens, skip_special_tokens: bool) -> str:
    end = "" if skip_special_tokens else "<end>"
    return "".join(end if token == END else LETTERS[token] for token in tokens)


def finish(output: list[int], limit: int = 10, **params):
    """The request after its newest token, with its finish."""
    request = Request("r", [1], SamplingParams(**params), 0, limit, output=output)
    request.finish = StopRules(frozenset({END}), decode).check(request)
    return request


@pytest.mark.parametrize(
    ("output", "params", "expected"),
    [
        ([1, 2], {}, None),
        ([1, 0], {}, {"type": "stop", "matched": 0}),
        ([1, 0], {"ignore_eos": True}, None),
        ([1, 4], {"stop_token_ids": frozenset({4})}, {"type": "stop", "matched": 4}),
        ([1, 4], {"stop_token_ids": frozenset({4}), "ignore_eos": True}, None),
        ([1, 2], {"stop": ("bc",)}, {"type": "stop", "matched": "bc"}),
        ([1, 3], {"stop": ("x", "bb")}, {"type": "stop", "matched": "bb"}),
        ([1, 4], {"stop": ("bc",)}, None),
        ([1, 0], {"stop": ("<end>",), "ignore_eos": True}, None),
        (
            [1, 0],
            {"stop": ("<end>",), "ignore_eos": True, "skip_special_tokens": False},
            {"type": "stop", "matched": "<end>"},
        ),
    ],
)
def test_reasons(output, params, expected):
    assert finish(output, **params).finish == expected


def test_length_comes_before_the_end_token():
    assert finish([1, 0], limit=2).finish == {"type": "length", "length": 2}


@pytest.mark.parametrize(
    ("output", "params", "text"),
    [
        ([1, 0], {}, "ab"),
        ([1, 0], {"skip_special_tokens": False}, "ab"),
        ([1, 0], {"skip_special_tokens": False, "no_stop_trim": True}, "ab<end>"),
        ([1, 4], {"stop_token_ids": frozenset({4})}, "ab"),
        ([1, 4], {"stop_token_ids": frozenset({4}), "no_stop_trim": True}, "abd"),
        ([4, 1, 2], {"stop": ("bc",)}, "da"),
        ([4, 1, 2], {"stop": ("bc",), "no_stop_trim": True}, "dabc"),
    ],
)
def test_text(output, params, text):
    request = finish(output, **params)
    assert request.finish is not None
    assert visible_text(request, request.output, decode) == text


def test_answer_of_a_finished_request():
    ask = LogProbAsk(True, start=1, top=1, token_ids=(9,))
    request = Request("r", [1, 2, 3], SamplingParams(), 0, 10, ask, output=[1, 0])
    request.log_probs = [-0.5, -0.25]
    request.input_log_probs, request.input_top = [-1.0], [[(-0.1, 4)]]
    request.input_ids_logprobs = [[-3.0]]
    request.output_top = [[(-0.5, 1)], [(-0.25, 0)]]
    request.output_ids_logprobs = [[-4.0], [-5.0]]
    request.finish = {"type": "stop", "matched": 0}
    request.weight_version = "v3"
    body = answer(request, 2, decode)
    meta = body["meta_info"]
    assert (body["text"], body["output_ids"]) == ("ab", [1, 0])
    assert meta["input_token_logprobs"] == [[None, 2, None], [-1.0, 3, None]]
    assert meta["output_token_logprobs"] == [[-0.5, 1, None], [-0.25, 0, None]]
    assert meta["input_top_logprobs"] == [None, [[-0.1, 4, None]]]
    assert meta["input_token_ids_logprobs"] == [None, [[-3.0, 9, None]]]
    assert meta["output_token_ids_logprobs"] == [[[-4.0, 9, None]], [[-5.0, 9, None]]]
    assert meta["finish_reason"] == {"type": "stop", "matched": 0}
    assert (meta["id"], meta["weight_version"]) == ("r", "v3")
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, 2)
    assert meta["output_token_logprobs_length"] == 2 and "e2e_latency" in meta


def test_a_streamed_prefix_hides_what_the_engine_did_since():
    request = Request("r", [1], SamplingParams(), 0, 10, output=[1, 5, 0])
    request.finish = {"type": "stop", "matched": 0}
    body = answer(request, 2, decode)
    assert body["output_ids"] == [1, 5]
    assert body["text"] == "ab"  # half a character is not shown
    assert body["meta_info"]["finish_reason"] is None
    assert "e2e_latency" not in body["meta_info"]
    assert "output_token_logprobs" not in body["meta_info"]
