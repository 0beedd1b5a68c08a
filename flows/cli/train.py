"""`slime train CONFIG.yaml [--flag value ...]`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.summary import summary
from flows.cli.terminal_logs import quiet_console
from flows.server import (
    OwnServer,
    ServerError,
    api_answers,
    client_environment,
    configured_api_url,
)
from flows.stop import Stopper
from slime_core.config.flags import FlagParser, add_flags, overrides_of, parse
from slime_core.config.loading import load_config
from slime_core.config.tree import RunConfig
from slime_core.report.terminal import Terminal
from slime_core.run.identity import RunChoice

if TYPE_CHECKING:
    from flows.launch import Launch

log = logging.getLogger(__name__)
DRAIN_S = 3.0
WATCH_S = 1.0


def main(arguments: list[str]) -> int:
    """Trains; returns the exit status.

    Raises:
        SlimeError: what stopped the run, as one sentence.
    """
    parsed = parse(_parser(), arguments)
    config = load_config(parsed.config or {}, overrides_of(parsed))
    return Command(config, parsed).run()


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="slime train",
        usage="slime train CONFIG.yaml [--flag value ...]",
        description="Train, or take up the last unfinished run of the same identity.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="the run's configuration")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--new", action="store_true", help="start another run, do not resume")
    which.add_argument("--run-id", metavar="ID", help="resume exactly this run, or start it")
    parser.add_argument(
        "--take-over", action="store_true", help="do not wait for a silent owner of the run"
    )
    parser.add_argument(
        "--no-prefect", action="store_true", help="run the stages without Prefect's server and UI"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    add_flags(parser)
    return parser


class Command:
    """One start from the command line, from choosing the run to the last printed line."""

    def __init__(self, config: RunConfig, options: argparse.Namespace) -> None:
        self._config = config
        self._options = options
        self._workspace = Path(config.run.workspace)
        self._server: OwnServer | None = None
        self._imports = threading.Thread(target=_import_flows, name="imports")
        self._stopper = Stopper()
        self._terminal = Terminal(config.run.num_rollout)

    def run(self) -> int:
        """Everything in its order; the children end whatever happens."""
        from flows.launch import choose

        self._stopper.install()
        launch: Launch | None = None
        choice = choose(self._config, self._which())
        self._terminal.say(choice.sentence)
        self._terminal.say(f"starting {self._parts()}")
        try:
            launch = self._start(choice)
            asyncio.run(self._train(launch))
        except asyncio.CancelledError:
            log.info("the run was stopped")
        finally:
            self._end()
        stopped = self._stopper.exit_code
        for line in summary(self._config, launch, self._server, stopped is not None):
            self._terminal.say(line)
        return stopped or 0

    def _parts(self) -> str:
        server = "" if self._options.no_prefect or configured_api_url() else "Prefect's server, "
        return f"{server}Ray, trainer and engines (about 15 s)"

    def _which(self) -> str:
        return "never" if self._options.new else (self._options.run_id or "auto")

    def _start(self, choice: RunChoice) -> Launch:
        """Starts Prefect's server and the run's processes side by side."""
        from flows.launch import Launch

        if not self._options.no_prefect:
            self._choose_server()
            self._imports.start()
        launch = Launch.start(self._config, self._which(), self._options.take_over, choice)
        launch.report = self._terminal
        if not self._options.no_prefect:
            self._imports.join()
        quiet_console(self._terminal.say, launch.session.paths.logs / "prefect.log")
        self._stopper.install()
        return launch

    def _choose_server(self) -> None:
        """Takes the user's Prefect API, else starts our own; then points the client there."""
        chosen = configured_api_url()
        if chosen is None:
            self._server = OwnServer.start(self._workspace)
            os.environ.update(client_environment(self._server.api_url, self._server.home))
            return
        url, origin = chosen
        if not api_answers(url, timeout_s=5):
            raise ServerError(
                f"Prefect's API at {url} (from {origin}) does not answer: start it, unset it, or "
                "add --no-prefect"
            )
        os.environ.update(client_environment(url, None))

    async def _train(self, launch: Launch) -> None:
        task = asyncio.ensure_future(self._body(launch))
        self._stopper.watch(task)
        try:
            await task
        finally:
            if launch.flow_run_id is not None and self._stopper.exit_code is not None:
                from flows.prefect_api import mark_stopped

                await mark_stopped(launch.flow_run_id)

    async def _body(self, launch: Launch) -> None:
        from flows.launch import LAUNCH, plain_training

        LAUNCH.set(launch)
        if self._options.no_prefect:
            await plain_training(launch)
            return
        from flows.prefect_api import API_ERRORS
        from flows.train import train

        launch.take_signals = self._stopper.install
        watch = asyncio.ensure_future(self._keep_server())
        try:
            if self._server is not None:
                limit_s = self._config.fault_tolerance.start_timeout_s
                await asyncio.to_thread(self._server.wait_healthy, limit_s)
            await train(self._config)
        except API_ERRORS as error:
            if not launch.finished:
                raise ServerError(f"Prefect's API failed: {error}") from error
            log.warning("Prefect was not told that the run has finished: %s", error)
        finally:
            watch.cancel()

    async def _keep_server(self) -> None:
        """Starts our server again should it end before the run does."""
        while self._server is not None:
            await asyncio.sleep(WATCH_S)
            if not self._server.alive:
                log.warning("Prefect's server ended: starting it again")
                self._server = self._server.restarted()

    def _end(self) -> None:
        """Hands over what Prefect's client still holds, then ends our server."""
        self._terminal.close()
        if self._imports.ident is not None:
            self._imports.join()
            from prefect.events.worker import EventsWorker

            EventsWorker.drain_all(timeout=DRAIN_S)
        if self._server is not None:
            self._server.stop()


def _import_flows() -> None:
    """Loads Prefect while Ray starts."""
    import flows.train  # noqa: F401
