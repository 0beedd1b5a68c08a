"""The scheduler against plain forward passes of the same model, and against itself."""

from __future__ import annotations

import random

import pytest
import torch

from slime_core.engines.embedded.request import LogProbAsk, Request
from tests.unit.engines.conftest import run_all


def reference(model, request: Request, temperature: float = 1.0) -> torch.Tensor:
    """Teacher-forced log-probs [len(tokens) - 1] of the model's own forward."""
    tokens = torch.tensor([request.tokens])
    with torch.inference_mode():
        logits = model.module(input_ids=tokens).logits[0].float()
    full = torch.log_softmax(logits / temperature, -1)
    return full[:-1].gather(-1, tokens[0, 1:, None])[:, 0]


def random_prompt(rng: random.Random, low: int = 1, high: int = 40) -> list[int]:
    return [rng.randrange(3, 100) for _ in range(rng.randint(low, high))]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_a_teacher_forced_forward(
    shared_model, new_scheduler, new_request, deterministic, temperature
):
    rng = random.Random(5)
    requests = [
        new_request(
            random_prompt(rng),
            limit=rng.randint(1, 60),
            ask=LogProbAsk(True, start=0),
            temperature=temperature,
            ignore_eos=True,
        )
        for _ in range(30)
    ]
    run_all(new_scheduler(deterministic=deterministic), requests)
    for request in requests:
        assert len(request.output) == len(request.log_probs) == request.limit
        at = len(request.prompt) - 1
        expected = reference(shared_model, request, temperature)[at:]
        assert torch.tensor(request.log_probs) == pytest.approx(expected, abs=1e-5)
        prompt = reference(shared_model, request)[:at]
        assert torch.tensor(request.input_log_probs) == pytest.approx(prompt, abs=1e-5)


def test_greedy_equals_the_argmax_of_a_plain_forward(shared_model, new_scheduler, new_request):
    rng = random.Random(6)
    requests = [new_request(random_prompt(rng), 20, temperature=0.0) for _ in range(12)]
    run_all(new_scheduler(), requests)
    for request in requests:
        tokens = list(request.prompt)
        for token in request.output:
            with torch.inference_mode():
                logits = shared_model.module(input_ids=torch.tensor([tokens])).logits[0, -1]
            assert token == int(logits.argmax())
            tokens.append(token)


def crowd(new_request, rng: random.Random, count: int) -> list[Request]:
    return [
        new_request(
            random_prompt(rng, 1, 90),
            limit=rng.randint(0, 60),
            temperature=rng.choice([0.0, 0.5, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            ask=LogProbAsk(True, start=rng.choice([-1, 0])),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("length", [1, 5, 8, 9, 31, 64])
def test_deterministic_mode_ignores_the_crowd(new_scheduler, new_request, length):
    """Bit-identical tokens and log-probs, alone and among 100 others that come and go."""
    rng = random.Random(length)
    prompt = random_prompt(rng, length, length)

    def mine() -> Request:
        ask = LogProbAsk(True, start=0)
        return new_request(prompt, 50, ask, sampling_seed=11, ignore_eos=True)

    alone, among, late = mine(), mine(), mine()
    run_all(new_scheduler(deterministic=True), [alone])
    scheduler = new_scheduler(deterministic=True, running=48, prefill_tokens=300)
    scheduler.submit(crowd(new_request, rng, 50))
    scheduler.submit([among])
    scheduler.submit(crowd(new_request, rng, 50))
    for _ in range(7):
        scheduler.step()
    run_all(scheduler, [late])
    for other in (among, late):
        assert other.output == alone.output
        assert other.log_probs == alone.log_probs
        assert other.input_log_probs == alone.input_log_probs


def test_seeds_alone_decide_also_without_deterministic_mode(new_scheduler, new_request):
    """Rounding aside, neighbours do not change a sample: its random numbers are its own."""
    rng = random.Random(3)
    prompts = [random_prompt(rng, 5, 5) for _ in range(40)]
    alone = [new_request(prompt, sampling_seed=i) for i, prompt in enumerate(prompts)]
    for request in alone:
        run_all(new_scheduler(), [request])
    together = [new_request(prompt, sampling_seed=i) for i, prompt in enumerate(prompts)]
    run_all(new_scheduler(), together)
    same = [a.output == b.output for a, b in zip(alone, together, strict=True)]
    assert sum(same) >= 39


def test_a_continuation_draws_the_numbers_that_the_whole_would(new_scheduler, new_request):
    prompt = [24, 21, 27, 20, 34]
    whole = new_request(prompt, 30, sampling_seed=4, ignore_eos=True)
    run_all(new_scheduler(deterministic=True), [whole])
    rest = new_request([*prompt, *whole.output[:12]], 18, sampling_seed=4, ignore_eos=True)
    run_all(new_scheduler(deterministic=True), [rest])
    assert whole.output[12:] == rest.output


def test_requests_with_one_prompt_share_its_prefill(new_scheduler, new_request):
    requests = [new_request([24, 21, 27, 20, 34]) for _ in range(8)]
    scheduler = new_scheduler()
    run_all(scheduler, requests)
    assert [request.cached_tokens for request in requests] == [0] + [4] * 7
    assert len({tuple(request.output) for request in requests}) > 1


def test_no_more_run_than_allowed(new_scheduler, new_request):
    scheduler = new_scheduler(running=3)
    requests = [new_request([20 + i % 10, 34], 9, ignore_eos=True) for i in range(10)]
    scheduler.submit(requests)
    most = 0
    while not scheduler.idle:
        scheduler.step()
        most = max(most, len(scheduler.running))
    assert most == 3
    assert all(len(request.output) == 9 for request in requests)


def test_a_long_prompt_does_not_starve_and_is_not_starved(new_scheduler, new_request):
    scheduler = new_scheduler(prefill_tokens=64)
    long = new_request([5] * 200, 5, ignore_eos=True)
    short = [new_request([20 + i % 10, 21 + i // 10], 40, ignore_eos=True) for i in range(60)]
    scheduler.submit([*short[:30], long, *short[30:]])
    for _ in range(8):
        scheduler.step()
    assert long.finish == {"type": "length", "length": 5}
    run_all(scheduler, [])
    assert all(len(request.output) == 40 for request in short)


def test_abort_ends_waiting_and_running_apart(new_scheduler, new_request):
    scheduler = new_scheduler(running=2)
    requests = [new_request([20 + i, 34], 30, ignore_eos=True) for i in range(4)]
    scheduler.submit(requests)
    scheduler.step()
    ended = scheduler.abort(lambda request: request is not requests[0])
    assert len(ended) == 3
    assert requests[1].finish["message"] == "Aborted" and requests[1].output
    assert requests[3].finish["message"] == "Abort in waiting queue" and not requests[3].output
    run_all(scheduler, [])
    assert len(requests[0].output) == 30


@pytest.mark.parametrize("deterministic", [False, True])
def test_retracted_requests_go_on_where_they_were(new_scheduler, new_request, deterministic):
    prompt = [24, 21, 27, 20, 34]
    whole = new_request(prompt, 40, sampling_seed=9, ignore_eos=True)
    run_all(new_scheduler(deterministic=deterministic), [whole])
    scheduler = new_scheduler(deterministic=deterministic)
    cut = new_request(prompt, 40, sampling_seed=9, ignore_eos=True)
    scheduler.submit([cut])
    for _ in range(10):
        scheduler.step()
    scheduler.retract()
    assert len(scheduler.waiting) == 1 and not scheduler.running
    run_all(scheduler, [])
    assert cut.output == whole.output
    assert cut.retractions == 1
    assert torch.tensor(cut.log_probs) == pytest.approx(torch.tensor(whole.log_probs), abs=1e-5)


def test_zero_new_tokens_score_and_sample_nothing(new_scheduler, new_request):
    request = new_request([24, 21, 27], 0, LogProbAsk(True, start=1, top=2, token_ids=(5,)))
    run_all(new_scheduler(), [request])
    assert request.output == [] and request.finish == {"type": "length", "length": 0}
    assert len(request.input_log_probs) == len(request.input_top) == 1
    assert len(request.input_ids_logprobs[0]) == 1


def test_damaged_weights_fail_the_request_and_leave_no_trace(
    private_model, new_scheduler, new_request
):
    scheduler = new_scheduler(private_model)
    weight = private_model.module.model.norm.weight
    good = weight.clone()
    weight.fill_(float("nan"))
    broken = new_request([24, 21, 27])
    run_all(scheduler, [broken])
    assert broken.finish["type"] == "abort" and broken.finish["status_code"] == 500
    weight.copy_(good)
    after, clean = new_request([24, 21], sampling_seed=1), new_request([24, 21], sampling_seed=1)
    run_all(scheduler, [after])
    run_all(new_scheduler(), [clean])
    assert (after.output, after.log_probs) == (clean.output, clean.log_probs)


def test_the_version_is_the_one_at_the_end(new_scheduler, new_request):
    scheduler = new_scheduler()
    request = new_request([24, 21], 10, ignore_eos=True)
    scheduler.submit([request])
    scheduler.step()
    scheduler.weight_version = "v1"
    run_all(scheduler, [])
    assert request.weight_version == "v1"
