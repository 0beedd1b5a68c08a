"""A client for one engine: SGLang, or the embedded engine behind the same protocol."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson

from slime_core.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    PauseMode,
    Unread,
    UpdateResult,
    batch_body,
    disk_update_body,
    error_message,
    generate_body,
    parse_result,
    pause_body,
    tensor_update_body,
)
from slime_core.engines.transport import BROKEN, NEVER_SENT, Connections, lines
from slime_core.errors import DeadlineError, EngineError
from slime_core.waits import Deadline

IDLE_CONNECTION_S = 4.0
"""Below the 5 s after which a stock uvicorn (SGLang's) closes an idle connection."""

CONTROL_CONNECTIONS = 16


class EngineAnswerError(EngineError):
    """An engine answered with an error status.

    Attributes:
        url: what was called.
        status: HTTP status.
        message: the engine's own sentence.
    """

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(url, status, message)  # as they are, so that it can leave its process
        self.url, self.status, self.message = url, status, message

    def __str__(self) -> str:
        return f"{self.url} answered {self.status}: {self.message}"


def refused(error: BaseException) -> bool:
    """Whether an engine refused the request itself, so that asking again would end the same."""
    answered = isinstance(error, EngineAnswerError)
    return answered and 400 <= error.status < 500 and error.status not in (408, 429)


class EngineUnreachableError(EngineError):
    """No connection, or it broke before the answer: the engine may have ended."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(url, reason)
        self.url, self.reason = url, reason

    def __str__(self) -> str:
        return f"{self.url} cannot be reached: {self.reason}"


class EngineDeadlineError(EngineError, DeadlineError):
    """An engine did not answer in time; the request may still run there."""

    def __init__(self, url: str, seconds: float) -> None:
        super().__init__(url, seconds)
        self.url, self.seconds = url, seconds

    def __str__(self) -> str:
        return f"waited {self.seconds:.0f} s for the answer of {self.url}"


class EngineClient:
    """Calls one engine.

    A call whose connection could not be opened is repeated `connect_retries` times with growing,
    jittered pauses: it never reached the engine. Reads are repeated after a broken connection
    too. Nothing else is repeated here; what to do with a lost generation is the caller's matter.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float = 60.0,
        generate_timeout_s: float = 3600.0,
        update_timeout_s: float = 600.0,
        max_connections: int = 512,
        connect_retries: int = 3,
    ) -> None:
        """
        Args:
            url: for example http://127.0.0.1:30000.
            timeout_s: for short calls.
            generate_timeout_s: for one /generate call from sending to the whole answer.
            update_timeout_s: for weight updates and abort-mode pauses.
        """
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._generate_timeout_s = generate_timeout_s
        self._update_timeout_s = update_timeout_s
        self._retries = connect_retries
        self._jitter = random.Random()
        # Control calls have connections of their own, so that an abort never waits behind the
        # requests it is to end.
        self._generating = Connections(self.url, max_connections, IDLE_CONNECTION_S)
        self._control = Connections(self.url, CONTROL_CONNECTIONS, IDLE_CONNECTION_S)

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._generating.close()
        await self._control.close()

    @property
    def in_flight(self) -> int:
        """Generate calls that have not been answered."""
        return self._generating.in_flight

    # -- generation

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generates one sample. An aborted one is a result with finish_type "abort".

        Raises:
            EngineError: refused, unreachable, too late, or the answer is malformed.
        """
        body = generate_body(request)
        return parse_result(await self._json("POST", "/generate", body, self._generate_timeout_s))

    async def generate_raw(self, body: dict[str, Any]) -> Any:
        """The JSON answer to a body of /generate that somebody else made."""
        return await self._json("POST", "/generate", body, self._generate_timeout_s)

    async def generate_batch(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """Generates several samples in one call; it returns when the last has ended."""
        return (await self.generate_unread(requests)).read()

    async def generate_unread(self, requests: Sequence[GenerateRequest]) -> Unread:
        """`generate_batch` that leaves it to the caller when the answer is read."""
        body = batch_body(requests)
        raw = await self._call("POST", "/generate", body, self._generate_timeout_s)
        return Unread(lambda: self._batch(raw, len(requests)))

    def _batch(self, raw: bytes, wanted: int) -> list[GenerateResult]:
        answers = self._loaded(raw, "/generate")
        if not isinstance(answers, list) or len(answers) != wanted:
            raise EngineError(
                f"{self.url}/generate gave {len(answers)} results for {wanted} requests"
            )
        return [parse_result(answer) for answer in answers]

    async def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateResult]:
        """Yields the sample as it grows; each result holds all tokens so far."""
        body = generate_body(request, stream=True)
        url, deadline = f"{self.url}/generate", Deadline("a stream", self._generate_timeout_s)
        async with AsyncExitStack() as opened:
            # The deadline stands around each wait, never around a yield: it would cancel the
            # caller.
            async with self._deadline(url, deadline.remaining_s):
                answer = await opened.enter_async_context(
                    self._generating.answer("POST", "/generate", orjson.dumps(body))
                )
                if answer.status != 200:
                    self._check(answer.status, url, await answer.read())
            events = lines(answer)
            while True:
                async with self._deadline(url, deadline.remaining_s):
                    line = await anext(events, None)
                if line is None:
                    raise EngineUnreachableError(url, "the stream ended before [DONE]")
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if data:
                    yield _stream_event(url, data)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens[1:] under the engine's weights, at temperature 1, from a prefill."""
        return (await self.score_versioned(tokens))[0]

    async def score_versioned(self, tokens: Sequence[int]) -> tuple[list[float], str]:
        """`score`, with the weight version that the engine reports for it."""
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        result = await self.generate(GenerateRequest(tokens, sampling, logprob_start=0))
        if len(result.prompt_log_probs) != len(tokens) - 1:
            raise EngineError(
                f"{self.url} gave {len(result.prompt_log_probs)} log-probs for {len(tokens)} tokens"
            )
        return result.prompt_log_probs, result.weight_version

    # -- control

    async def health(self, timeout_s: float = 10.0) -> bool:
        """True when /health answers 200 in time. Never raises for an engine that is away."""
        try:
            await self._call("GET", "/health", None, timeout_s, retries=0)
        except EngineError:
            return False
        return True

    async def model_info(self) -> dict[str, Any]:
        """Model path, architectures and weight_version."""
        return await self._json("GET", "/model_info", None, self._timeout_s)

    async def server_info(self) -> dict[str, Any]:
        """The engine's options and load."""
        return await self._json("GET", "/server_info", None, self._timeout_s)

    async def weight_version(self) -> str:
        return str((await self.model_info())["weight_version"])

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Stops generation. In abort mode returns once every running request was answered."""
        await self._call("POST", "/pause_generation", pause_body(mode), self._update_timeout_s)

    async def resume(self) -> None:
        """Goes on after a pause."""
        await self._call("POST", "/continue_generation", {}, self._timeout_s)

    async def abort(self, rid: str) -> None:
        """Ends one request; its caller gets what was sampled so far. Unknown ids are ignored."""
        await self._call("POST", "/abort_request", {"rid": rid}, self._timeout_s)

    async def abort_all(self) -> None:
        body = {"rid": "", "abort_all": True}
        await self._call("POST", "/abort_request", body, self._timeout_s)

    async def flush_cache(self) -> bool:
        """Drops cached keys and values. False when requests are held, which forbids it."""
        try:
            await self._call("POST", "/flush_cache", {}, self._timeout_s)
        except EngineAnswerError as error:
            if error.status == 400:
                return False
            raise
        return True

    # -- weights

    async def update_weights_from_disk(
        self, path: str, version: str, flush_cache: bool = True
    ) -> UpdateResult:
        """Loads safetensors from a folder that the engine can read.

        Pass flush_cache=False while requests are held (in_place, retract): with True the engine
        ends itself.

        Raises:
            EngineAnswerError: refused (status 400); the served weights are unchanged.
        """
        body = disk_update_body(path, version, flush_cache)
        return await self._update("/update_weights_from_disk", body)

    async def update_weights_from_tensor(
        self,
        payloads: Sequence[str],
        version: str | None = None,
        flush_cache: bool = True,
        load_format: str | None = None,
    ) -> UpdateResult:
        """Loads tensors from shared memory (see engines/tensor_wire.py)."""
        body = tensor_update_body(payloads, version, flush_cache, load_format)
        return await self._update("/update_weights_from_tensor", body)

    async def set_weight_version(self, version: str) -> None:
        """Renames the served weights without aborting requests."""
        body = {"new_version": version, "abort_all_requests": False}
        await self._call("POST", "/update_weight_version", body, self._timeout_s)

    async def _update(self, path: str, body: dict[str, Any]) -> UpdateResult:
        answer = await self._json("POST", path, body, self._update_timeout_s)
        message = str(answer.get("message", ""))
        if answer.get("success") is not True:
            raise EngineAnswerError(f"{self.url}{path}", 200, message)
        return UpdateResult(True, message)

    # -- transport

    async def _json(self, method: str, path: str, body: Any, timeout_s: float) -> Any:
        return self._loaded(await self._call(method, path, body, timeout_s), path)

    def _loaded(self, raw: bytes, path: str) -> Any:
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise EngineError(f"{self.url}{path} did not answer JSON: {raw[:200]!r}") from error

    async def _call(
        self, method: str, path: str, body: Any, timeout_s: float, retries: int | None = None
    ) -> bytes:
        """One call within a deadline that covers its retries."""
        to = self._generating if path == "/generate" else self._control
        content = None if body is None else orjson.dumps(body)
        attempts = self._retries if retries is None else retries
        url = f"{self.url}{path}"
        async with self._deadline(url, timeout_s):
            for attempt in range(attempts + 1):
                try:
                    status, raw = await to.call(method, path, content)
                    self._check(status, url, raw)
                    return raw
                except BROKEN as error:
                    unsent = isinstance(error, NEVER_SENT)
                    if attempt == attempts or not (unsent or method == "GET"):
                        raise
                await asyncio.sleep(self._jitter.uniform(0.5, 1.0) * 0.1 * 2**attempt)
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def _deadline(self, url: str, seconds: float) -> AsyncIterator[None]:
        timer = asyncio.timeout(seconds)
        try:
            async with timer:
                yield
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise EngineDeadlineError(url, seconds) from error
        except BROKEN as error:
            raise EngineUnreachableError(url, repr(error)) from error

    def _check(self, status: int, url: str, raw: bytes) -> None:
        if status == 200:
            return
        try:
            message = error_message(orjson.loads(raw))
        except orjson.JSONDecodeError:
            message = raw.decode(errors="replace").strip()[:500]
        raise EngineAnswerError(url, status, message)


def _stream_event(url: str, data: str) -> GenerateResult:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"{url} streamed something that is not JSON: {data[:200]!r}") from error
    if isinstance(event, dict) and "error" in event:
        raise EngineAnswerError(url, 400, error_message(event))
    return parse_result(event)
