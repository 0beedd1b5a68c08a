"""SGLang's HTTP endpoints on the embedded engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from slime_core import __version__
from slime_core.engines.embedded.answers import answer
from slime_core.engines.embedded.errors import RefusedRequestError
from slime_core.engines.embedded.frontend import Frontend
from slime_core.engines.embedded.metrics import EngineMetrics, Load, load_of
from slime_core.engines.embedded.options import EngineOptions
from slime_core.engines.embedded.parsing import GenerateCall, ModelLimits, parse_generate
from slime_core.engines.embedded.request import Request
from slime_core.engines.embedded.tokenizer import Tokenizer

log = logging.getLogger(__name__)
HEALTH_DEADLINE_S = 20.0
FLUSH_POLL_S = 0.02
MAX_STEP_PAUSE_S = 10.0
CLIENT_GONE = 499


class EngineServer:
    """The endpoints that serve and describe; those that change weights stand in WeightRoutes.

    Attributes:
        frontend: the way to the engine thread.
        limits: what prompts are checked against.
    """

    def __init__(
        self,
        options: EngineOptions,
        config: dict[str, Any],
        frontend: Frontend,
        tokenizer: Tokenizer,
        limits: ModelLimits,
    ) -> None:
        self.frontend = frontend
        self.limits = limits
        self._options = options
        self._config = config
        self._tokenizer = tokenizer
        self._created_s = int(time.time())
        self._seeds_drawn = 0
        tokens = options.max_running_requests * limits.context_length
        self._metrics = EngineMetrics(options.name, tokens)
        frontend.finished = self._metrics.observe

    def app(self, more: list[Route]) -> Starlette:
        """The ASGI application with these endpoints and `more`."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.frontend.start()
            yield

        both, post = ["GET", "POST"], ["POST"]
        routes = [
            Route("/generate", self.generate, methods=["POST", "PUT"]),
            Route("/health", self.health),
            Route("/health_generate", self.health_generate),
            Route("/model_info", self.model_info),
            Route("/get_model_info", self.model_info),
            Route("/server_info", self.server_info),
            Route("/get_server_info", self.server_info),
            Route("/get_load", self.get_load),
            Route("/v1/loads", self.loads),
            Route("/v1/models", self.models),
            Route("/metrics", self.metrics),
            Route("/flush_cache", self.flush_cache, methods=both),
            Route("/pause_generation", self.pause_generation, methods=post),
            Route("/continue_generation", self.continue_generation, methods=post),
            Route("/abort_request", self.abort_request, methods=post),
            Route("/slow_down", self.slow_down, methods=post),
            *more,
        ]
        return Starlette(
            routes=routes,
            lifespan=lifespan,
            exception_handlers={
                RefusedRequestError: _refused,
                HTTPException: _http_error,
                ClientDisconnect: _gone,
            },
        )

    # -- generation

    async def generate(self, http: HTTPRequest) -> Response:
        body = await read_json(http)
        call = parse_generate(body, self.limits, self._tokenizer.encode, self._new_seed)
        if call.stream:
            return StreamingResponse(self._events(call), media_type="text/event-stream")
        if not await _unless_gone(http, self.frontend.generate(call)):
            return Response(status_code=CLIENT_GONE)
        _raise_failure(call.requests)
        bodies = [self._answer(request, len(request.output)) for request in call.requests]
        return json_response(bodies[0] if call.single else bodies)

    def _answer(self, request: Request, count: int) -> dict[str, Any]:
        return answer(request, count, self._tokenizer.decode)

    async def _events(self, call: GenerateCall) -> AsyncIterator[bytes]:
        try:
            async with aclosing(self.frontend.stream(call)) as news:
                async for index, request, count in news:
                    body = self._answer(request, count)
                    if not call.single:
                        body["index"] = index
                    yield b"data: " + orjson.dumps(body) + b"\n\n"
        except RefusedRequestError as error:
            yield b"data: " + orjson.dumps({"error": {"message": str(error)}}) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _new_seed(self) -> int:
        """Seed of a request without one: a fixed one in deterministic mode, as in SGLang."""
        if self._options.deterministic:
            return self._options.random_seed
        self._seeds_drawn += 1
        return (self._options.random_seed << 32) + self._seeds_drawn

    # -- health and description

    async def health(self, _: HTTPRequest) -> Response:
        """200 while the engine thread answers between steps."""
        try:
            await asyncio.wait_for(self._load(), HEALTH_DEADLINE_S)
        except TimeoutError:
            return Response(status_code=503)
        return Response()

    async def health_generate(self, http: HTTPRequest) -> Response:
        """200 when a one-token request comes through; while paused as /health."""
        if self.frontend.paused:
            return await self.health(http)
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        call = parse_generate(body, self.limits, self._tokenizer.encode, self._new_seed)
        try:
            await asyncio.wait_for(self.frontend.generate(call), HEALTH_DEADLINE_S)
        except TimeoutError:
            return Response(status_code=503)
        return Response()

    async def model_info(self, _: HTTPRequest) -> Response:
        options = self._options
        return json_response(
            {
                "model_path": options.model_path,
                "tokenizer_path": options.tokenizer_path or options.model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": await self.frontend.in_engine(lambda s: s.weight_version),
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": self._config.get("model_type"),
                "architectures": self._config.get("architectures"),
            }
        )

    async def server_info(self, _: HTTPRequest) -> Response:
        load = await self._load()
        return json_response(
            {
                **asdict(self._options),
                "context_length": self.limits.context_length,
                "version": __version__,
                "engine": "slime-flow embedded",
                "tp_size": 1,
                "dp_size": 1,
                "internal_states": [asdict(load)],
            }
        )

    async def get_load(self, _: HTTPRequest) -> Response:
        load = await self._load()
        row = {"dp_rank": 0, "num_reqs": load.running + load.waiting}
        row |= {"num_waiting_reqs": load.waiting, "num_tokens": load.tokens}
        return json_response([row])

    async def loads(self, _: HTTPRequest) -> Response:
        load = await self._load()
        row = {
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": load.waiting,
            "num_total_reqs": load.running + load.waiting,
            "num_used_tokens": load.tokens,
            "max_running_requests": self._options.max_running_requests,
        }
        totals = {f"total_{name}": row[f"num_{name}"] for name in ("running_reqs", "waiting_reqs")}
        return json_response(
            {"timestamp": time.time(), "dp_rank_count": 1, "loads": [row], "aggregate": totals}
        )

    async def models(self, _: HTTPRequest) -> Response:
        card = {"id": self._options.name, "object": "model", "created": self._created_s}
        card |= {"owned_by": "sglang", "root": self._options.name, "parent": None}
        card |= {"max_model_len": self.limits.context_length}
        return json_response({"object": "list", "data": [card]})

    async def metrics(self, _: HTTPRequest) -> Response:
        page = self._metrics.render(await self._load())
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _load(self) -> Load:
        paused = self.frontend.worker.paused
        return await self.frontend.in_engine(lambda scheduler: load_of(scheduler, paused))

    # -- control

    async def flush_cache(self, http: HTTPRequest) -> Response:
        """200 when nothing runs or waits inside the engine; nothing else is cached here."""
        try:
            timeout_s = float(http.query_params.get("timeout", 0.0))
        except ValueError as error:
            raise RefusedRequestError(f"timeout must be seconds: {error}") from error
        end = time.monotonic() + timeout_s
        while not (idle := await self.frontend.in_engine(lambda scheduler: scheduler.idle)):
            if time.monotonic() >= end:
                break
            await asyncio.sleep(FLUSH_POLL_S)
        if not idle:
            return PlainTextResponse("Flush cache failed.\n", status_code=400)
        return PlainTextResponse("Cache flushed.\n")

    async def pause_generation(self, http: HTTPRequest) -> Response:
        mode = (await read_json(http, optional=True)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise RefusedRequestError(f"mode must be abort, retract or in_place, got {mode!r}")
        await self.frontend.pause(mode)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, http: HTTPRequest) -> Response:
        await read_json(http, optional=True)
        await self.frontend.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def abort_request(self, http: HTTPRequest) -> Response:
        body = await read_json(http, optional=True)
        if body.get("abort_all"):
            await self.frontend.abort_all()
        else:
            await self.frontend.abort(str(body.get("rid") or ""))
        return Response()

    async def slow_down(self, http: HTTPRequest) -> Response:
        """Makes every step take longer, by `forward_sleep_time` seconds; null ends that."""
        seconds = (await read_json(http)).get("forward_sleep_time") or 0.0
        if not isinstance(seconds, (int, float)) or not 0 <= seconds <= MAX_STEP_PAUSE_S:
            raise RefusedRequestError(
                f"forward_sleep_time must be from 0 to {MAX_STEP_PAUSE_S}, got {seconds!r}"
            )
        await self.frontend.slow_down(float(seconds))
        return Response()


def json_response(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


async def read_json(http: HTTPRequest, optional: bool = False) -> Any:
    """The decoded body; an object, or {} for an empty body where that is allowed.

    Raises:
        RefusedRequestError: not JSON, or not an object.
    """
    raw = await http.body()
    if optional and not raw:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RefusedRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedRequestError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


async def _unless_gone(http: HTTPRequest, work: Awaitable[Any]) -> bool:
    """Awaits `work` until it is done, or cancels it when the client hangs up (False)."""

    async def hang_up() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(hang_up())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        gone.cancel()
        task.cancel()


def _raise_failure(requests: list[Request]) -> None:
    """A request that ended with a status of its own gives that status to the whole call."""
    for request in requests:
        status = (request.finish or {}).get("status_code")
        if status is not None:
            raise RefusedRequestError(str((request.finish or {}).get("message")), status)


def _refused(_: HTTPRequest, error: Exception) -> Response:
    status = error.status if isinstance(error, RefusedRequestError) else 500
    return json_response({"error": {"message": str(error)}}, status)


def _http_error(_: HTTPRequest, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return json_response({"detail": detail, "error": {"message": detail}}, status)


def _gone(_: HTTPRequest, __: Exception) -> Response:
    """Nobody reads this answer; it only keeps a hang-up out of the error log."""
    return Response(status_code=CLIENT_GONE)
