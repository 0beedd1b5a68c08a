"""The client against servers that misbehave on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from slime_core.engines.client import (
    EngineAnswerError,
    EngineClient,
    EngineDeadlineError,
    EngineUnreachableError,
)
from slime_core.engines.health import HealthRules, HealthWatch
from slime_core.engines.launcher import free_port
from slime_core.engines.protocol import GenerateRequest
from slime_core.errors import DeadlineError, EngineError

Connection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(handle: Connection, port: int = 0) -> AsyncIterator[str]:
    """A raw TCP server; `handle` gets each connection."""

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        finally:
            writer.close()

    listening = await asyncio.start_server(guarded, "127.0.0.1", port)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()


def answering(status: int, body: bytes) -> Connection:
    """Answers every request of a connection alike."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await read_head(reader):
            writer.write(
                b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body
            )
            await writer.drain()

    return handle


async def read_head(reader: asyncio.StreamReader) -> str:
    """Reads one request; its first line, or "" at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return ""
    text = head.decode().lower()
    if "content-length: " in text:
        await reader.readexactly(int(text.split("content-length: ")[1].split("\r\n")[0]))
    return head.decode().split("\r\n")[0]


async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await read_head(reader):
        pass


def test_nobody_there():
    async def main() -> None:
        url = f"http://127.0.0.1:{free_port()}"
        async with EngineClient(url, connect_retries=1) as client:
            with pytest.raises(EngineUnreachableError, match=f"{url}/generate cannot be reached"):
                await client.generate(GenerateRequest([1]))
            assert await client.health() is False

    asyncio.run(main())


def test_a_connection_that_could_not_be_opened_is_tried_again():
    async def main() -> None:
        port = free_port()
        async with EngineClient(f"http://127.0.0.1:{port}", connect_retries=8) as client:
            call = asyncio.create_task(client.resume())
            await asyncio.sleep(0)
            async with server(answering(200, b"{}"), port):
                await call

    asyncio.run(main())


def test_a_post_that_may_have_arrived_is_not_sent_again():
    async def main() -> None:
        calls = 0

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal calls
            if await read_head(reader):
                calls += 1

        async with server(handle) as url, EngineClient(url) as client:
            with pytest.raises(EngineUnreachableError):
                await client.generate(GenerateRequest([1]))
            assert calls == 1
            with pytest.raises(EngineUnreachableError):
                await client.model_info()
            assert calls > 1 + 3  # reading is harmless: one call and at least three more

    asyncio.run(main())


def test_a_closed_client_opens_nothing_any_more():
    async def main() -> None:
        async with server(answering(200, b"{}")) as url:
            async with EngineClient(url) as client:
                await client.resume()
            for call in (client.resume(), client.generate(GenerateRequest([1]))):
                with pytest.raises(EngineUnreachableError, match="was closed"):
                    await call
            assert await client.health() is False

    asyncio.run(main())


def test_a_silent_engine_meets_the_deadline():
    async def main() -> None:
        async with (
            server(stay_silent) as url,
            EngineClient(url, timeout_s=0.1, generate_timeout_s=0.2) as client,
        ):
            with pytest.raises(EngineDeadlineError, match=f"{url}/generate") as caught:
                await client.generate(GenerateRequest([1]))
            assert isinstance(caught.value, DeadlineError) and isinstance(caught.value, EngineError)
            with pytest.raises(EngineDeadlineError):
                async for _ in client.generate_stream(GenerateRequest([1])):
                    pass
            assert await client.health(0.1) is False
            assert client.in_flight == 0

    asyncio.run(main())


def test_a_callers_own_timeout_stays_the_callers():
    async def main() -> None:
        async with server(stay_silent) as url, EngineClient(url) as client:
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(0.1):
                    await client.generate(GenerateRequest([1]))
            assert not isinstance(caught.value, EngineError)
            assert client.in_flight == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (
            400,
            b'{"error": {"message": "the prompt is empty"}}',
            "answered 400: the prompt is empty",
        ),
        (500, b"Internal Server Error", "answered 500: Internal Server Error"),
        (404, b'{"detail": "Not Found"}', "answered 404: Not Found"),
    ],
)
def test_error_answers(status, body, says):
    async def main() -> None:
        async with server(answering(status, body)) as url, EngineClient(url) as client:
            with pytest.raises(EngineAnswerError, match=says) as caught:
                await client.generate(GenerateRequest([1]))
            assert (caught.value.status, caught.value.url) == (status, f"{url}/generate")
            with pytest.raises(EngineAnswerError, match=says):
                async for _ in client.generate_stream(GenerateRequest([1])):
                    pass

    asyncio.run(main())


@pytest.mark.parametrize("body", [b"", b"<html>", b"[1, 2]", b"{}", b"[]"])
def test_answers_that_make_no_sense(body):
    async def main() -> None:
        async with server(answering(200, body)) as url, EngineClient(url) as client:
            with pytest.raises(EngineError):
                await client.generate(GenerateRequest([1]))
            with pytest.raises(EngineError):
                await client.generate_batch([GenerateRequest([1])])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (b"data: {nonsense\n\n", EngineError),
        (b'data: {"error": {"message": "no"}}\n\n', EngineAnswerError),
        (b"", EngineUnreachableError),
    ],
)
def test_broken_streams(stream, error):
    async def main() -> None:
        async with server(answering(200, stream)) as url, EngineClient(url) as client:
            with pytest.raises(error):
                async for _ in client.generate_stream(GenerateRequest([1])):
                    pass

    asyncio.run(main())


def test_a_refused_flush_and_a_failed_update():
    async def main() -> None:
        refusing = answering(400, b"Flush cache failed.\n")
        async with server(refusing) as url, EngineClient(url) as client:
            assert await client.flush_cache() is False
        body = b'{"success": false, "message": "wrong shape"}'
        async with server(answering(200, body)) as url, EngineClient(url) as client:
            with pytest.raises(EngineAnswerError, match="wrong shape"):
                await client.update_weights_from_disk("/x", "v1")

    asyncio.run(main())


def test_control_calls_do_not_wait_behind_generation():
    async def main() -> None:
        started = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while head := await read_head(reader):
                if "/generate" in head:
                    started.set()
                    await asyncio.sleep(3600)
                writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 0\r\n\r\n")

        async with server(handle) as url, EngineClient(url, max_connections=1) as client:
            calls = [asyncio.create_task(client.generate(GenerateRequest([1]))) for _ in range(3)]
            await asyncio.wait_for(started.wait(), 10)
            await asyncio.wait_for(client.abort_all(), 10)
            assert client.in_flight == 3, "those that wait for a connection, too"
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            assert client.in_flight == 0

    asyncio.run(main())


def test_calls_cancelled_at_any_moment_leave_a_working_client():
    """A connection whose call broke off must not be given to the next one."""

    async def main() -> None:
        body = b"{}" + b" " * 2000
        async with (
            server(answering(200, body)) as url,
            EngineClient(url, max_connections=1, timeout_s=20) as client,
        ):
            for turns in range(150):
                call = asyncio.create_task(client._json("POST", "/generate", {}, 20))
                for _ in range(turns % 60):
                    await asyncio.sleep(0)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
                assert await client._json("POST", "/generate", {}, 20) == {}
                assert client.in_flight == 0

    asyncio.run(main())


class Probe:
    """An engine whose health answers are given."""

    url = "http://engine"

    def __init__(self, answers: list[bool]) -> None:
        self.answers = answers

    async def health(self, timeout_s: float = 1.0) -> bool:
        return self.answers.pop(0)


def test_health_watch_counts_failures_in_a_row():
    async def main() -> int:
        gone = asyncio.Event()

        async def on_gone() -> None:
            gone.set()

        probe = Probe([True, False, False, True, False, False, False])
        watch = HealthWatch(probe, HealthRules(0.0, 1.0, 3), alive=lambda: True)
        await asyncio.wait_for(watch.run(on_gone), 10)
        assert gone.is_set() and watch.gone
        return watch.checks

    assert asyncio.run(main()) == 7


def test_health_watch_does_not_ask_a_process_that_ended():
    async def main() -> None:
        watch = HealthWatch(Probe([]), HealthRules(), alive=lambda: False)
        assert await watch.check() is False and watch.gone

    asyncio.run(main())
