"""Reading /generate bodies: shapes, defaults, and one sentence for each refusal."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from slime_core.engines.embedded.errors import RefusedRequestError
from slime_core.engines.embedded.parsing import ModelLimits, parse_generate

LIMITS = ModelLimits(vocab_size=100, context_length=50)


def parse(**body):
    counter = itertools.count(1000)
    return parse_generate(body, LIMITS, lambda text: [ord(c) for c in text], lambda: next(counter))


def test_single_prompt_with_defaults():
    call = parse(input_ids=[1, 2, 3])
    (request,) = call.requests
    assert call.single and not call.stream
    assert request.prompt == [1, 2, 3] and request.seed == 1000
    assert request.limit == 46  # 128, cut to what the context leaves
    assert not request.ask.wanted


def test_text_is_encoded():
    assert parse(text="AB").requests[0].prompt == [65, 66]
    call = parse(text=["A", "BC"])
    assert [request.prompt for request in call.requests] == [[65], [66, 67]] and not call.single


def test_batch_spreads_single_values_and_takes_lists():
    call = parse(
        input_ids=[[1], [2, 3]],
        sampling_params=[{"temperature": 0}, {"max_new_tokens": 5}],
        return_logprob=True,
        logprob_start_len=[0, -1],
        top_logprobs_num=3,
        token_ids_logprob=[[7], None],
        rid="job",
    )
    first, second = call.requests
    assert not call.single and call.rids == ["job_0", "job_1"]
    assert first.params.greedy and second.limit == 5
    assert (first.ask.start, second.ask.start) == (0, -1)
    assert first.ask.top == second.ask.top == 3
    assert (first.ask.token_ids, second.ask.token_ids) == ((7,), ())


def test_a_batch_of_one_stays_a_batch():
    assert not parse(input_ids=[[1]]).single


def test_n_samples_follow_their_prompt_with_seeds_of_their_own():
    call = parse(input_ids=[[1], [2]], sampling_params={"n": 3, "sampling_seed": 5}, rid=["a", "b"])
    assert [request.prompt for request in call.requests] == [[1]] * 3 + [[2]] * 3
    assert call.rids == ["a_0", "a_1", "a_2", "b_0", "b_1", "b_2"]
    seeds = [request.seed for request in call.requests]
    assert seeds[0] == 5 and len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:]
    assert not parse(input_ids=[1], sampling_params={"n": 2}).single


def test_negative_seeds_are_taken_modulo_64_bits():
    assert parse(input_ids=[1], sampling_params={"sampling_seed": -1}).requests[0].seed == 2**64 - 1


def test_unknown_request_fields_are_accepted():
    call = parse(input_ids=[1], model=None, return_text_in_logprobs=False, priority=3, whatever={})
    assert len(call.requests) == 1


def test_neutral_values_of_other_sampling_parameters_are_accepted():
    neutral = {"frequency_penalty": 0.0, "repetition_penalty": 1.0, "regex": None, "top_p": None}
    assert len(parse(input_ids=[1], sampling_params=neutral).requests) == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"input_ids": []}, "prompt is empty"),
        ({"input_ids": [[]]}, "prompt is empty"),
        ({"text": ""}, "prompt is empty"),
        ({"text": []}, "at least one prompt"),
        ({"text": [1]}, "list of strings"),
        ({"input_ids": "1 2"}, "list of token ids"),
        ({"input_ids": [1, "2"]}, "list of token ids"),
        ({"input_ids": [1.0]}, "list of token ids"),
        ({"input_ids": [True]}, "list of token ids"),
        ({"input_ids": [[1], 2]}, "list of token ids"),
        ({"input_ids": [1, 100]}, "from 0 to 99 (the vocabulary), got 100"),
        ({"input_ids": [-1]}, "got -1"),
        ({"input_ids": [1] * 50}, "50 tokens) is longer than the model's context length (50"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 49}}, "together exceed"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 10**12}}, "together exceed"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 2.5}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature must be in"),
        ({"input_ids": [1], "sampling_params": {"temperature": float("nan")}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"temperature": float("inf")}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p must be in (0"),
        ({"input_ids": [1], "sampling_params": {"top_p": 1.5}}, "top_p"),
        ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k must be -1"),
        ({"input_ids": [1], "sampling_params": {"top_k": -2}}, "top_k"),
        ({"input_ids": [1], "sampling_params": {"min_p": 2}}, "min_p"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "n must be at least 1"),
        ({"input_ids": [1], "sampling_params": {"n": "2"}}, "n must be an integer"),
        ({"input_ids": [1], "sampling_params": {"stop": [""]}}, "stop must be"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": ["x"]}}, "stop_token_ids"),
        ({"input_ids": [1], "sampling_params": {"ignore_eos": 1}}, "ignore_eos must be true"),
        ({"input_ids": [1], "sampling_params": {"temprature": 1}}, "no parameter 'temprature'"),
        ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "does not support regex"),
        ({"input_ids": [1], "sampling_params": "greedy"}, "sampling_params must be an object"),
        (
            {"input_ids": [1], "sampling_params": {"min_new_tokens": 5, "max_new_tokens": 4}},
            "min_new_tokens 5 is more",
        ),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "1 entries for 2 prompts"),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 1}, {"n": 2}]}, "must be equal"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "2 different ids"),
        ({"input_ids": [1], "rid": 7}, "rid must be"),
        ({"input_ids": [1], "return_logprob": "yes"}, "return_logprob must be true"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 1}, "not inside"),
        ({"input_ids": [1], "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"input_ids": [1], "stream": 1}, "stream must be true"),
    ],
)
def test_refusals(body, says):
    with pytest.raises(RefusedRequestError) as caught:
        parse(**body)
    assert says in str(caught.value)
    assert caught.value.status == 400


def test_routes_are_told_by_an_engine_that_keeps_them():
    def routes_from(**body) -> int | None:
        limits = replace(LIMITS, routes=True)
        call = parse_generate({"input_ids": [[1, 2], [3]], **body}, limits, list, lambda: 0)
        (found,) = {request.routes_from for request in call.requests}
        return found

    assert routes_from() is None
    assert routes_from(return_routed_experts=True) == 0
    assert routes_from(return_routed_experts=True, routed_experts_start_len=1) == 1
    with pytest.raises(RefusedRequestError, match="from 0 to 1, the length of the prompt, got 2"):
        routes_from(return_routed_experts=True, routed_experts_start_len=2)
    with pytest.raises(RefusedRequestError, match="with --enable-return-routed-experts"):
        parse(input_ids=[1], return_routed_experts=True)


@pytest.mark.parametrize("body", [None, 5, "x", [], [1, 2]])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(RefusedRequestError, match="JSON object"):
        parse_generate(body, LIMITS, lambda text: [], lambda: 0)


def test_token_ids_outside_the_vocabulary_are_refused_for_log_probs():
    with pytest.raises(RefusedRequestError, match="token_ids_logprob"):
        parse(input_ids=[1], return_logprob=True, token_ids_logprob=[100])
