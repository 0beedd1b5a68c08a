"""A session turn by turn: what tokens a row gets, and which row."""

import asyncio
import base64
import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from slime_core.agents.errors import ApiError
from slime_core.agents.requests import parse_request
from slime_core.agents.session import Session
from slime_core.agents.turn_log import RecordedTurn
from slime_core.engines.client import EngineAnswerError
from slime_core.errors import DeadlineError
from slime_core.rollout.routed import RouteAsk
from slime_core.sample import Sample, Status
from tests.unit.agents.sessions import Notebook, Script, opened, runtime, say, text_of
from tests.unit.rollout.scripted import Characters

TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
CALL = 'I add.\n<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'


def played(script, body, **options):
    async def run():
        session = await opened(runtime(script, **options))
        try:
            return await body(session), session
        finally:
            await session.close()

    return asyncio.run(run())


def test_turns_are_joined_token_by_token_and_only_answers_are_trained():
    script = Script("four", "yes")

    async def body(session):
        first = await say(session, ("user", "2+2?"))
        told = first.message
        await say(session, ("user", "2+2?"), told, ("user", "sure?"))
        return first

    first, session = played(script, body)
    [row] = session.rows()
    assert text_of(row) == "[user]2+2?~\n[assistant]four~\n[user]sure?~\n[assistant]yes~"
    bridge = len("\n[user]sure?~\n[assistant]")
    assert row.loss_mask == [1] * 5 + [0] * bridge + [1] * 4
    assert row.rollout_log_probs == [-0.5] * 5 + [0.0] * bridge + [-0.5] * 4
    assert [(s.length, s.trainable) for s in row.spans] == [(5, True), (bridge, False), (4, True)]
    assert script.bodies[1]["input_ids"] == row.tokens[:-4], "token in, token out"
    assert (row.response, row.status, row.metadata) == (
        "yes", Status.COMPLETED, {"from": "row", "round_number": 2, "branch": 0})  # fmt: skip
    assert (first.finish_reason, first.tokens, first.message["content"]) == ("stop", 5, "four")
    assert first.usage["prompt_tokens"] == len("[user]2+2?~\n[assistant]")


class Routed(Script):
    """Tells routes whose numbers are a token's place and the number of the request."""

    async def generate_raw(self, body):
        answer = await super().generate_raw(body)
        end = len(body["input_ids"]) + len(answer["output_ids"]) - 1
        places = np.arange(body["routed_experts_start_len"], end, dtype=np.int32)
        told = np.stack([places, np.full_like(places, len(self.bodies))], -1)
        answer["meta_info"]["routed_experts"] = base64.b64encode(told.tobytes()).decode()
        return answer


def test_each_turn_keeps_the_routes_that_it_was_answered_with_also_from_the_log():
    log = Notebook()

    async def talk(script):
        there = runtime(script)
        there.sampling = replace(there.sampling, routes=RouteAsk(1, 2))
        session = await opened(there, log)
        told = (await say(session, ("user", "2+2?"))).message
        await say(session, ("user", "2+2?"), told, ("user", "sure?"))
        await session.close()
        return session.rows()

    [row] = asyncio.run(talk(Routed("four", "yes")))
    log.turns = [RecordedTurn(**json.loads(json.dumps(asdict(turn)))) for turn in log.turns]
    [again] = asyncio.run(talk(Routed()))
    first = len("[user]2+2?~\n[assistant]four~") - 1
    want = [[[at, 1 if at < first else 2]] for at in range(len(row.tokens) - 1)]
    assert row.rollout_routed_experts.tolist() == want
    assert again.rollout_routed_experts.tolist() == want


def test_a_template_that_would_drop_reasoning_does_not_change_what_was_sampled():
    class Forgetful(Characters):
        def apply_chat_template(self, messages, **options):
            last = len(messages) - 1
            kept = [
                m if m["role"] != "assistant" or i == last
                else {**m, "content": m["content"].rpartition("</think>")[2]}
                for i, m in enumerate(messages)
            ]  # fmt: skip
            return super().apply_chat_template(kept, **options)

    async def body(session):
        said = (await say(session, ("user", "2+2?"))).message
        await say(session, ("user", "2+2?"), said, ("user", "sure?"))

    _, session = played(Script("<think>hm</think>four", "yes"), body, tokenizer=Forgetful())
    [row] = session.rows()
    assert "<think>hm</think>four~\n[user]sure?" in text_of(row)


def test_another_try_from_the_middle_is_a_row_of_its_own_whose_beginning_is_context():
    script = Script("one", "two", "three")

    async def body(session):
        said = (await say(session, ("user", "a"))).message
        await say(session, ("user", "a"), said, ("user", "b"))
        await say(session, ("user", "a"), said, ("user", "c"))

    _, session = played(script, body)
    first, second = session.rows()
    shared = "[user]a~\n[assistant]one~\n"
    assert text_of(first) == shared + "[user]b~\n[assistant]two~"
    assert text_of(second) == shared + "[user]c~\n[assistant]three~"
    assert (second.prompt_length, second.loss_mask) == (
        len(shared + "[user]c~\n[assistant]"),
        [1] * 6,
    )
    assert first.rollout_id == second.rollout_id == 0
    assert {first.response, second.response} == {"three"}, "a rollout has one last word"
    assert [row.metadata["branch"] for row in (first, second)] == [0, 1]


def test_equal_questions_at_once_are_different_answers():
    script = Script("x", "y", "z")

    async def body(session):
        await asyncio.gather(*(say(session, ("user", "a")) for _ in range(3)))

    _, session = played(script, body)
    assert len(session.rows()) == 3
    seeds = {body["sampling_params"]["sampling_seed"] for body in script.bodies}
    assert len(seeds) == 3


def test_a_changed_history_or_other_tools_begin_anew():
    async def body(session):
        said = (await say(session, ("user", "a"))).message
        await say(session, ("user", "a"), {**said, "content": "not this"}, ("user", "b"))
        await say(session, ("user", "a"), said, ("user", "b"), tools=[TOOL])

    _, session = played(Script("one", "two", "three"), body)
    texts = [text_of(row) for row in session.rows()]
    assert texts[1] == "[user]a~\n[assistant]not this~\n[user]b~\n[assistant]two~"
    assert texts[2] == "[user]a~\n[assistant]one~\n[user]b~\n[assistant]three~"
    assert all(sum(row.loss_mask) == row.response_length for row in session.rows())


def test_calls_come_as_openai_has_them_and_are_known_again():
    async def body(session):
        first = await say(session, ("user", "6*7?"), tools=[TOOL])
        [call] = first.message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "42"}
        sent_back = {**first.message, "refusal": None, "annotations": []}
        await say(session, ("user", "6*7?"), sent_back, result, tools=[TOOL])
        return first

    first, session = played(Script(CALL, "42"), body)
    [call] = first.message["tool_calls"]
    assert (first.finish_reason, first.message["content"]) == ("tool_calls", "I add.")
    assert call["function"]["name"] == "calculator"
    assert json.loads(call["function"]["arguments"]) == {"expression": "6*7"}
    [row] = session.rows()
    assert text_of(row) == f"[user]6*7?~\n[assistant]{CALL}~\n[tool]42~\n[assistant]42~"


def test_an_answer_cut_by_max_tokens_gets_its_end_from_the_template():
    async def body(session):
        first = await say(session, ("user", "a"), max_tokens=3)
        assert (first.finish_reason, first.message["content"]) == ("length", "lon")
        await say(session, ("user", "a"), first.message, ("user", "b"))

    _, session = played(Script("long story", "end"), body)
    [row] = session.rows()
    assert text_of(row) == "[user]a~\n[assistant]lon~\n[user]b~\n[assistant]end~"
    assert row.loss_mask[:5] == [1, 1, 1, 0, 0], "nobody sampled this end token"
    assert row.status is Status.COMPLETED


def test_length_and_turns_have_limits_that_the_agent_is_told():
    async def too_long(session):
        said = (await say(session, ("user", "a"))).message
        with pytest.raises(ApiError, match="length limit") as error:
            await say(session, ("user", "a"), said, ("user", "b"))
        assert error.value.code == "context_length_exceeded"

    _, session = played(Script("one", "two"), too_long, limit=6)
    [row] = session.rows()
    assert (text_of(row), row.status) == ("[user]a~\n[assistant]one~", Status.TRUNCATED)

    async def too_often(session):
        await say(session, ("user", "a"))
        with pytest.raises(ApiError, match="max_turns"):
            await say(session, ("user", "b"))

    played(Script("one", "two"), too_often, max_turns=1)


def test_what_a_weight_update_interrupts_goes_on_with_a_span_of_its_own():
    class Interrupted(Script):
        async def generate_raw(self, body):
            answer = await super().generate_raw(body)
            if len(self.bodies) == 1:
                answer["meta_info"]["finish_reason"] = {"type": "abort"}
                answer["meta_info"]["output_token_logprobs"].pop()
            else:
                answer["meta_info"]["weight_version"] = "a-2"
            return answer

    async def body(session):
        return await say(session, ("user", "a"))

    answer, session = played(Interrupted("on", "e"), body)
    [row] = session.rows()
    assert (answer.message["content"], text_of(row)) == ("one", "[user]a~\n[assistant]one~")
    assert [(span.length, span.weight_version) for span in row.spans] == [(2, "a-1"), (2, "a-2")]


def test_after_a_crash_what_is_asked_again_is_answered_from_the_log():
    async def begun(log):
        session = await opened(runtime(Script("one", "two")), log)
        said = (await say(session, ("user", "a"))).message
        said_too = (await say(session, ("user", "a"), said, ("user", "b"))).message
        return said, said_too, session.rows()

    async def again(log, script):
        session = await opened(runtime(script), log)
        said = (await say(session, ("user", "a"))).message
        said_too = (await say(session, ("user", "a"), said, ("user", "b"))).message
        await say(session, ("user", "a"), said, ("user", "b"), said_too, ("user", "c"))
        return said, said_too, session.rows()

    log = Notebook()
    said, said_too, rows = asyncio.run(begun(log))
    script = Script("three")
    assert asyncio.run(again(log, script))[:2] == (said, said_too)
    assert len(script.bodies) == 1, "only the turn that was not there yet"
    log.turns = log.turns[:1]
    script = Script("two", "three")
    _, _, late = asyncio.run(again(log, script))
    assert len(script.bodies) == 2
    assert text_of(late[0]).startswith(text_of(rows[0]))
    assert late[0].loss_mask[: len(rows[0].loss_mask)] == rows[0].loss_mask


def test_a_log_of_another_conversation_is_left_alone():
    async def body(question, log, script):
        session = await opened(runtime(script), log)
        return (await say(session, ("user", question))).message["content"]

    log = Notebook()
    assert asyncio.run(body("a", log, Script("one"))) == "one"
    assert asyncio.run(body("b", log, Script("other"))) == "other"


def test_a_repeated_request_gets_the_answer_it_missed():
    script = Script("one", "two")

    async def body(session):
        first = await say(session, ("user", "a"))
        again = await say(session, ("user", "a"), repeated=True)
        return first, again

    (first, again), session = played(script, body)
    assert first == again and len(script.bodies) == len(session.rows()) == 1


def test_faults_of_ours_fail_the_attempt_and_those_of_the_request_do_not():
    class Broken(Script):
        error: Exception

        async def generate_raw(self, body):
            raise self.error

    async def body(session):
        with pytest.raises(ApiError) as error:
            await say(session, ("user", "a"))
        return error.value.status

    script = Broken()
    script.error = DeadlineError("waited 5 s")
    status, session = played(script, body)
    assert status == 504 and session.failure is script.error and session.rows() == []
    script.error = EngineAnswerError("u", 400, "too long")
    status, session = played(script, body)
    assert status == 400 and session.failure is None


def test_closing_ends_what_is_under_way():
    class Slow(Script):
        async def generate_raw(self, body):
            await asyncio.sleep(60)
            raise AssertionError

    async def body(session):
        waiting = asyncio.create_task(say(session, ("user", "a")))
        await asyncio.sleep(0)
        while not session._all_tasks:
            await asyncio.sleep(0)
        await session.close()
        with pytest.raises(ApiError, match="the session was closed"):
            await waiting

    _, session = played(Slow(), body)
    assert session.rows() == []


def test_a_closed_session_answers_nobody():
    async def body(session):
        await session.close()
        with pytest.raises(ApiError) as error:
            await say(session, ("user", "a"))
        return error.value.status

    assert played(Script("one"), body)[0] == 401


def test_parameters_that_a_function_changes_reach_the_engine():
    script = Script("four")

    async def run():
        sample = Sample(prompt="2+2?", index=0)
        changed = {"temperature": 0.25, "top_k": 3, "max_new_tokens": 7}
        session = Session(runtime(script), sample, changed)
        await session.open()
        try:
            await say(session, ("user", "2+2?"))
        finally:
            await session.close()

    asyncio.run(run())
    sent = script.bodies[0]["sampling_params"]
    assert (sent["temperature"], sent["top_k"], sent["max_new_tokens"]) == (0.25, 3, 7)


def test_a_length_limit_of_ones_own_counts_over_all_turns():
    script = Script("four", "yes", "more")

    async def run():
        session = await opened(runtime(script), max_new_tokens=40)
        first = (await say(session, ("user", "2+2?"))).message
        talk = [("user", "2+2?"), first, ("user", "sure?")]
        second = (await say(session, *talk)).message
        with pytest.raises(ApiError, match="length limit"):
            await say(session, *talk, second, ("user", "and then?"))
        [row] = session.rows()
        await session.close()
        return row

    row = asyncio.run(run())
    bridge = len("\n[user]sure?~\n[assistant]")
    limits = [body["sampling_params"]["max_new_tokens"] for body in script.bodies]
    assert limits == [40, 40 - 5 - bridge]
    assert row.response_length == 5 + bridge + 4 < 40


def test_of_two_equal_requests_the_one_that_nobody_heard_is_given_again():
    async def run():
        session = await opened(runtime(Script("one", "two", "three")))
        request = parse_request({"messages": [{"role": "user", "content": "hi"}]})
        first, second = (session.begin(request, "m", False) for _ in range(2))
        said = [(await session.answer_of(task)).message["content"] for task in (first, second)]
        session.unheard(request, first)
        again = [(await session.complete(request, "m", False)).message["content"] for _ in "ab"]
        await session.close()
        return said, again

    said, again = asyncio.run(run())
    assert sorted(said) == ["one", "two"] and again == [said[0], "three"]
