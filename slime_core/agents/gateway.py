"""The HTTP server that agents talk to: OpenAI's protocol on the loopback, one key a session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from slime_core.agents.answers import Answer, completion, event, events
from slime_core.agents.errors import ApiError
from slime_core.agents.requests import ChatRequest, parse_request
from slime_core.agents.session import Session
from slime_core.errors import EngineError
from slime_core.rewards.aside import AsideLoop
from slime_core.waits import apoll, within

log = logging.getLogger(__name__)
START_S = 30.0
STOP_S = 5.0
KEEP_ALIVE_S = 120  # longer than clients keep an idle connection
CLIENT_GONE = 499  # nobody reads it
SIGN_OF_LIFE_S = 10.0
"""A streamed answer that takes longer begins with comments, so that no client gives it up."""
RETRIES = "x-stainless-retry-count"
"""What OpenAI's clients count repeated requests in."""


class Gateway:
    """Serves all sessions of one rollout worker; it starts listening with the first of them.

    Args:
        model: what /v1/models calls the model.
        sessions: how many may be open at once.

    Attributes:
        slots: one for each session.
        aside: where agents run, so that one that blocks does not hold up who answers it.
    """

    def __init__(self, model: str, sessions: int) -> None:
        self.slots = asyncio.Semaphore(sessions)
        self.aside = AsideLoop()
        self._model = model
        self._sessions: dict[str, Session] = {}
        self._noted: set[str] = set()
        self._starting = asyncio.Lock()
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None
        self._url = ""

    async def admit(self, session: Session) -> str:
        """Lets a session's key in; returns the base URL for clients.

        Raises:
            EngineError: the server does not start.
        """
        async with self._starting:
            if self._task is None or self._task.done():
                await self._start()
        self._sessions[session.key] = session
        return f"{self._url}/v1"

    def dismiss(self, session: Session) -> None:
        """Its key is unknown from now on."""
        self._sessions.pop(session.key, None)

    async def close(self) -> None:
        """Stops listening; requests under way end."""
        await self.aside.close()
        if self._task is None:
            return
        self._server.should_exit = True
        self._server.force_exit = True
        await within("the agents' gateway to stop", STOP_S, self._task)

    async def _start(self) -> None:
        import uvicorn

        class Server(uvicorn.Server):
            """The process has its own ways with signals."""

            @contextlib.contextmanager
            def capture_signals(self) -> Generator[None]:
                yield

        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(
            self._app(), log_config=None, access_log=False, loop="none", ws="none",
            lifespan="off", timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        self._server = server = Server(config)
        self._task = task = asyncio.create_task(server.serve(sockets=[listener]), name="gateway")

        async def up() -> bool | None:
            if task.done():
                raise EngineError(f"the agents' gateway ended at once: {task.exception()}")
            return server.started or None

        await apoll("the agents' gateway to start", START_S, up, interval_s=0.01)
        self._url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        log.info("agents reach the model at %s", self._url)

    def _app(self) -> Starlette:
        routes = []
        for prefix in ("", "/{key}"):  # a key may stand in the path, for clients that send none
            routes += [
                Route(f"{prefix}/v1/chat/completions", self._complete, methods=["POST"]),
                Route(f"{prefix}/v1/models", self._models),
                Route(f"{prefix}/v1/models/{{model:path}}", self._models),
            ]
        handlers = {ApiError: _failed, HTTPException: _not_there}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _models(self, http: Request) -> Response:
        self._session_of(http)
        card = {"id": self._model, "object": "model", "created": 0, "owned_by": "slime-flow"}
        if "model" in http.path_params:
            return _json(card)
        return _json({"object": "list", "data": [card]})

    async def _complete(self, http: Request) -> Response:
        session = self._session_of(http)
        try:
            body = orjson.loads(await http.body())
        except orjson.JSONDecodeError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        request = parse_request(body)
        self._note(request)
        model = str(body.get("model") or self._model)
        repeated = http.headers.get(RETRIES, "0") not in ("", "0")
        task = session.begin(request, model, repeated)
        turn = asyncio.ensure_future(session.answer_of(task))
        turn.add_done_callback(lambda done: done.cancelled() or done.exception())  # told below
        gone = asyncio.ensure_future(http.receive())  # behind the body comes only the end
        # What fails soon fails with its status; later only an event is left to say so.
        patience_s = SIGN_OF_LIFE_S if request.stream else None
        try:
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait({turn, gone}, timeout=patience_s, return_when=first)
        finally:
            gone.cancel()
        if gone.done():  # first: an answer that came meanwhile reaches nobody
            session.unheard(request, task)
            return Response(status_code=CLIENT_GONE)
        if turn.done():
            answer = turn.result()
            if not request.stream:
                return _json(completion(answer, request.logprobs))
        body = _streamed(turn, request, lambda: session.unheard(request, task))
        return StreamingResponse(body, media_type="text/event-stream")

    def _session_of(self, http: Request) -> Session:
        key = http.path_params.get("key")
        if key is None:
            key = http.headers.get("authorization", "").removeprefix("Bearer ").strip()
        session = self._sessions.get(key)
        if session is None:
            raise ApiError(401, "no open session has this key", code="invalid_api_key")
        return session

    def first_time(self, what: str) -> bool:
        """Whether this was not asked before, for what the log says once."""
        new = what not in self._noted
        self._noted.add(what)
        return new

    def _note(self, request: ChatRequest) -> None:
        """Says once of each setting that the run decides it."""
        for name, value in request.of_the_run.items():
            if self.first_time(name):
                log.warning(
                    "an agent asks for %s=%r: sampling follows the run's own settings, which the "
                    "trainer computes with", name, value,
                )  # fmt: skip


async def _streamed(
    turn: asyncio.Future[Answer], request: ChatRequest, lost: Callable[[], None]
) -> AsyncIterator[bytes]:
    heard = False
    try:
        while not turn.done():
            yield b": the model is at work\n\n"
            await asyncio.wait({turn}, timeout=SIGN_OF_LIFE_S)
        async for piece in _pieces(turn, request):
            yield piece
        heard = True
    finally:
        if not heard:
            lost()


async def _pieces(turn: asyncio.Future[Answer], request: ChatRequest) -> AsyncIterator[bytes]:
    try:
        answer = turn.result()
    except ApiError as error:
        yield event(error.body())
        return
    for piece in events(answer, request.logprobs, request.include_usage):
        yield piece


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _failed(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.body(), error.status)


def _not_there(http: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    said = f"{http.method} {http.url.path.rpartition('/v1')[2] or '/'} is not served here"
    return _json(ApiError(status, said).body(), status)
