"""python -m slime_core.engines.embedded: one engine process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

from slime_core.engines.embedded.options import EngineOptions, parse_options
from slime_core.engines.lifetime import watch_parent
from slime_core.errors import EngineError

if TYPE_CHECKING:
    from starlette.applications import Starlette

log = logging.getLogger("slime_core.engines.embedded")
STOP_WITHIN_S = 1.5
KEEP_ALIVE_S = 600
"""Longer than any client pools a connection: the client must be the one who closes it."""


def main(argv: list[str] | None = None) -> int:
    """Starts the engine and serves until it is told to stop; returns the exit status."""
    options = parse_options(argv)
    logging.basicConfig(
        level=options.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if options.parent_pid:
        watch_parent(options.parent_pid, lambda: _leave("the parent process ended"))
    try:
        listener = _bind(options)
        app = _build(options)
        asyncio.run(_serve(app, listener, options))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _bind(options: EngineOptions) -> socket.socket:
    """Takes the port before the model is loaded, so that a clash shows at once."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on each connection: 40 ms an answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        raise EngineError(
            f"port {options.port} on {options.host} cannot be used ({error.strerror}); "
            f"choose another with --port"
        ) from error
    return listener


def _build(options: EngineOptions) -> Starlette:
    """Loads model and tokenizer and puts the parts together."""
    import torch

    from slime_core.engines.embedded.frontend import Frontend
    from slime_core.engines.embedded.model import ServedModel
    from slime_core.engines.embedded.parsing import ModelLimits
    from slime_core.engines.embedded.scheduler import Limits, Scheduler
    from slime_core.engines.embedded.server import EngineServer
    from slime_core.engines.embedded.stopping import StopRules
    from slime_core.engines.embedded.tokenizer import end_token_ids, load_tokenizer
    from slime_core.engines.embedded.weight_routes import WeightRoutes
    from slime_core.engines.embedded.worker import EngineWorker

    if options.deterministic and options.device == "cpu":
        # With more threads a matrix product is split by its number of rows, and rounds by it.
        torch.set_num_threads(1)
    path, tokenizer_path = options.model_path, options.tokenizer_path or options.model_path
    model = ServedModel(path, options.device, options.dtype, options.deterministic, options.routes)
    tokenizer = load_tokenizer(tokenizer_path)
    ends = end_token_ids(path, tokenizer_path, tokenizer)
    limits = Limits(options.max_running_requests, options.max_prefill_tokens, options.deterministic)
    scheduler = Scheduler(model, StopRules(ends, tokenizer.decode), limits)
    scheduler.weight_version = options.weight_version
    context = options.context_length or model.max_context
    if context > model.max_context:
        raise EngineError(
            f"--context-length {context} is more than the model's {model.max_context} tokens"
        )
    frontend = Frontend(lambda report: EngineWorker(scheduler, report))
    prompts = ModelLimits(model.vocab_size, context, options.routes)
    server = EngineServer(options, model.config, frontend, tokenizer, prompts)
    return server.app(WeightRoutes(frontend).routes())


async def _serve(app: Starlette, listener: socket.socket, options: EngineOptions) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn raises a stop signal again after its shutdown; here the exit status is 0."""

        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            yield

    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=options.log_level,
        access_log=False,
        loop="asyncio",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )
    server = Server(config)
    loop = asyncio.get_running_loop()

    def stop(name: str) -> None:
        log.info("%s: stopping", name)
        server.should_exit = True
        # The engine thread may sit in a long step, and open calls may never end by themselves.
        loop.call_later(STOP_WITHIN_S, _leave, "open requests were cut off")

    for sign in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sign, stop, sign.name)
    # Tens of thousands of objects from the imports live for ever; later collections skip them.
    gc.collect()
    gc.freeze()
    try:
        listener.listen(config.backlog)
    except OSError as error:
        raise EngineError(
            f"port {options.port} on {options.host} cannot be used ({error.strerror}); "
            f"choose another with --port"
        ) from error
    log.info("serving %s on %s:%d", options.name, options.host, options.port)
    await server.serve(sockets=[listener])
    _leave("stopped")


def _leave(reason: str) -> None:
    """Ends at once: the engine thread cannot be interrupted inside a step."""
    log.info("ending: %s", reason)
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
