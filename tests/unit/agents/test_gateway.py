"""The gateway over real HTTP with OpenAI's own client; the engine is scripted."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from starlette.requests import Request

from slime_core.agents import gateway as module
from slime_core.agents.gateway import Gateway
from slime_core.agents.generate import OpenSession
from tests.unit.agents.sessions import Script, opened, runtime, text_of

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USER: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def served(script: Any, **options: Any):
    gateway = Gateway("tiny", 4)
    session = await opened(runtime(script, **options))
    base_url = await gateway.admit(session)
    try:
        yield OpenSession(base_url, session.key, session), gateway
    finally:
        await session.close()
        await gateway.close()


def talk(script: Any, body: Callable[[AsyncOpenAI, OpenSession], Awaitable[Any]], **options: Any):
    async def run():
        async with (
            served(script, **options) as (at, _),
            AsyncOpenAI(base_url=at.base_url, api_key=at.api_key) as client,
        ):
            return await body(client, at)

    return asyncio.run(run())


def test_an_answer_with_its_usage_and_log_probs():
    async def body(client, at):
        listed = [model.id async for model in client.models.list()]
        answer = await client.chat.completions.create(
            model="any", messages=USER, logprobs=True, temperature=0.3)  # fmt: skip
        return listed, answer, at.session.rows()

    listed, answer, [row] = talk(Script("four"), body)
    assert listed == ["tiny"]
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, answer.model) == ("four", "stop", "any")
    assert answer.usage.model_dump(exclude_none=True)["total_tokens"] == len(row.tokens)
    assert [one.logprob for one in choice.logprobs.content] == [-0.5] * 5
    assert text_of(row) == "[user]hi~\n[assistant]four~"


def test_a_stream_adds_up_to_the_same_text_and_the_same_tokens():
    async def body(client, at):
        stream = await client.chat.completions.create(
            model="m", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        return chunks, at.session.rows()

    text = "a longer answer than one piece holds, with ünïcode"
    chunks, [row] = talk(Script(text), body)
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == text and len(pieces) > 3
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == len(text) + 1 == row.response_length


def test_a_slow_stream_says_that_it_is_alive_and_then_answers_or_fails(monkeypatch):
    monkeypatch.setattr(module, "SIGN_OF_LIFE_S", 0.02)

    class Slow(Script):
        async def generate_raw(self, body):
            await asyncio.sleep(0.1)
            if not self.texts:
                raise module.EngineError("the engine is gone")
            return await super().generate_raw(body)

    async def body(client, at):
        create = client.with_options(max_retries=0).chat.completions.create
        chunks = [c async for c in await create(model="m", messages=USER, stream=True)]
        raw = httpx.AsyncClient(headers={"authorization": f"Bearer {at.api_key}"})
        async with raw, raw.stream("POST", f"{at.base_url}/chat/completions",
                                   json={"messages": USER, "stream": True}) as answer:  # fmt: skip
            lines = [line async for line in answer.aiter_lines()]
        with pytest.raises(openai.APIError, match="the engine is gone"):
            async for _ in await create(model="m", messages=USER, stream=True):
                pass
        return chunks, lines

    chunks, lines = talk(Slow("one", "two"), body)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "one"
    assert lines[0].startswith(":") and lines[-2] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_arrive(stream):
    async def body(client, at):
        create = client.chat.completions.create
        if not stream:
            answer = await create(model="m", messages=USER, tools=[TOOL])
            return answer.choices[0].finish_reason, answer.choices[0].message.tool_calls[0]
        chunks = [c async for c in await create(model="m", messages=USER, tools=[TOOL],
                                                stream=True)]  # fmt: skip
        [call] = [c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls]
        return chunks[-1].choices[0].finish_reason, call

    reason, call = talk(Script(CALL), body)
    assert (reason, call.function.name, call.function.arguments) == (
        "tool_calls", "add", '{"a": 1}')  # fmt: skip


@pytest.mark.parametrize("argument", ['"\\ud800"', "9" * 5000, "[" * 5000])
def test_a_call_that_cannot_be_read_is_text(argument):
    said = f'<tool_call>{{"name": "add", "arguments": {{"a": {argument}}}}}</tool_call>'

    async def body(client, at):
        answer = await client.chat.completions.create(model="m", messages=USER, tools=[TOOL])
        return answer.choices[0]

    choice = talk(Script(said), body, limit=9000)
    assert (choice.message.content, choice.message.tool_calls) == (said, None)


class Held(Script):
    """Answers once it is let go."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.go_on = asyncio.Event()

    async def generate_raw(self, body: Any) -> Any:
        texts = await super().generate_raw(body)
        await self.go_on.wait()
        return texts


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_nobody_heard_is_given_to_who_asks_again(monkeypatch, stream):
    """A client that goes away and sends no count of retries."""
    monkeypatch.setattr(module, "SIGN_OF_LIFE_S", 0.01)
    script = Held("one", "two")

    async def body(client, at):
        ask = {"model": "m", "messages": USER, "stream": stream}
        left = asyncio.Event()
        unheard = at.session.unheard
        at.session.unheard = lambda *given: (unheard(*given), left.set())
        url, head = f"{at.base_url}/chat/completions", {"authorization": f"Bearer {at.api_key}"}
        async with httpx.AsyncClient(headers=head) as impatient:
            first = asyncio.ensure_future(impatient.post(url, json=ask, timeout=60))
            while not script.bodies:
                await asyncio.sleep(0.001)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await asyncio.wait_for(left.wait(), 20)
        script.go_on.set()
        again = await client.chat.completions.create(model="m", messages=USER)
        other = await client.chat.completions.create(model="m", messages=USER)
        said = [answer.choices[0].message.content for answer in (again, other)]
        return said, at.session.rows()

    said, rows = talk(script, body)
    assert said == ["one", "two"], "asking once more after that is another try"
    assert len(rows) == 2 and len(script.bodies) == 2


def test_an_answer_that_came_when_the_client_had_left_is_kept_for_it():
    async def run():
        async with served(Script("one", "two")) as (at, gateway):
            told = [{"type": "http.request", "body": json.dumps({"messages": USER}).encode()}]

            async def receive():
                if told:
                    return told.pop()
                [task] = at.session._all_tasks
                await asyncio.shield(task)  # so that both have ended when somebody looks
                return {"type": "http.disconnect"}

            scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions",
                     "path_params": {"key": at.api_key}, "headers": []}  # fmt: skip
            first = await gateway._complete(Request(scope, receive))
            async with AsyncOpenAI(base_url=at.base_url, api_key=at.api_key) as client:
                again = await client.chat.completions.create(model="m", messages=USER)
            return first.status_code, again.choices[0].message.content, len(at.session.rows())

    assert asyncio.run(run()) == (499, "one", 1)


def test_errors_have_openais_form():
    async def body(client, at):
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as refused:
            await create(model="m", messages=USER, n=3)
        with pytest.raises(openai.AuthenticationError) as unknown:
            await client.with_options(api_key="sk-other").models.list()
        with pytest.raises(openai.NotFoundError) as away:
            await client.embeddings.create(model="m", input="x")
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {at.api_key}"}) as raw:
            broken = await raw.post(f"{at.base_url}/chat/completions", content=b"{")
        return refused.value, unknown.value, away.value, broken

    refused, unknown, away, broken = talk(Script(), body)
    assert (refused.param, unknown.code) == ("n", "invalid_api_key")
    assert "POST /embeddings is not served here" in str(away)
    assert broken.status_code == 400 and "not JSON" in broken.json()["error"]["message"]


def test_a_key_may_stand_in_the_path_and_opens_one_session_only():
    async def run():
        async with served(Script("mine")) as (at, gateway):
            other = await opened(runtime(Script("other")), index=1)
            await gateway.admit(other)
            async with AsyncOpenAI(base_url=at.url_with_key, api_key="whatever") as client:
                answer = await client.chat.completions.create(model="m", messages=USER)
            gateway.dismiss(at.session)
            async with AsyncOpenAI(base_url=at.base_url, api_key=at.api_key) as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
            return answer.choices[0].message.content, other.rows(), at.base_url

    said, others, url = asyncio.run(run())
    assert said == "mine" and others == []
    assert url.startswith("http://127.0.0.1:")


def test_the_clients_own_retry_gets_the_answer_that_its_first_try_missed():
    begun = asyncio.Event()

    class Slow(Script):
        async def generate_raw(self, body):
            begun.set()
            await asyncio.sleep(0.3)
            return await super().generate_raw(body)

    async def body(client, at):
        patient = client.with_options(timeout=httpx.Timeout(5.0, read=0.15), max_retries=3)
        answer = await patient.chat.completions.create(model="m", messages=USER)
        return answer.choices[0].message.content, at.session.rows()

    script = Slow("one", "two")
    said, rows = talk(script, body)
    assert (said, len(rows), len(script.bodies)) == ("one", 1, 1)
