"""One start of `slime train`, from choosing the run to the last printed line."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.settle import shown_as_running
from flows.cli.summary import summary
from flows.cli.terminal_logs import quiet_console
from flows.server import (
    OwnServer,
    ServerError,
    api_answers,
    client_environment,
    configured_api_url,
)
from flows.services.stack import api_url_of
from flows.stop import GOES_ON, Stopper
from slime_core.config.block_names import blocks_in
from slime_core.config.flags import FlagParser, add_flags
from slime_core.config.secrets import hidden
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError, SlimeError
from slime_core.report.terminal import Terminal
from slime_core.run.identity import RunChoice
from slime_core.run.paths import RunPaths

if TYPE_CHECKING:
    from flows.launch import Launch

log = logging.getLogger(__name__)
DRAIN_S = 3.0
WATCH_S = 1.0


class CancelledRunError(SlimeError):
    """Something other than a signal cancelled the run."""


def parser() -> FlagParser:
    """The flags of `slime train`."""
    made = FlagParser(
        prog="slime train",
        usage="slime train CONFIG.yaml [--flag value ...]",
        description="Train, or take up the last unfinished run of the same identity.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="the run's configuration")
    which = made.add_mutually_exclusive_group()
    which.add_argument("--new", action="store_true", help="start another run, do not resume")
    which.add_argument("--run-id", metavar="ID", help="resume exactly this run, or start it")
    _add_shared(made)
    return made


def resume_parser() -> FlagParser:
    """The flags of `slime resume`."""
    made = FlagParser(
        prog="slime resume",
        usage="slime resume RUN [--flag value ...]",
        description="Go on with a run as it was configured last.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("run", metavar="RUN", help="id, its beginning, or `last`")
    _add_shared(made)
    return made


def _add_shared(made: FlagParser) -> None:
    made.add_argument(
        "--take-over", action="store_true", help="do not wait for a silent owner of the run"
    )
    made.add_argument(
        "--no-prefect", action="store_true", help="run the stages without Prefect's server and UI"
    )
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    add_flags(made)


class Command:
    """Chooses the run, starts its processes and Prefect's server, trains, and tells the end."""

    def __init__(self, config: RunConfig, options: argparse.Namespace, stopper: Stopper) -> None:
        self._config = config
        self._options = options
        self._workspace = Path(config.run.workspace)
        self._own_prefect = not options.no_prefect and configured_api_url() is None
        self._server: OwnServer | None = None
        self._server_restarts = 0
        self._recorded: RunConfig | None = None
        self._imports = threading.Thread(target=_import_flows, name="imports", daemon=True)
        self._stopper = stopper
        self._terminal = Terminal(config.run.num_rollout)

    def run(self) -> int:
        """Everything in its order; the children end whatever happens."""
        from flows.launch import choose

        self._read_blocks()
        choice = choose(self._config, self._which())
        self._terminal.say(choice.sentence)
        if choice.finished:
            return self._tell_finished(choice)
        self._refuse_what_is_running(choice)
        launch: Launch | None = None
        self._terminal.starting(self._parts())
        try:
            launch = self._start(choice)
            asyncio.run(self._train(launch))
        except (Exception, asyncio.CancelledError) as error:
            # What a stop tears down may complain in many ways: the stop is what happened.
            if self._stopper.exit_code is None:
                if isinstance(error, asyncio.CancelledError):
                    raise CancelledRunError(f"the run was cancelled: {GOES_ON}") from error
                if (logs := self._paths(choice).logs).is_dir():
                    self._terminal.say(f"logs of the run: {logs}")
                raise
            log.info("the run was stopped", exc_info=True)
        finally:
            self._stopper.unwatch()
            self._end()
        stopped = self._stopper.exit_code
        how = "finished" if stopped is None else GOES_ON
        self._tell(choice, how, [] if launch is None else launch.left_over)
        return stopped or 0

    def _read_blocks(self) -> None:
        """Puts the places of blocks for their names, and their secrets into the environment."""
        if not blocks_in(self._config):
            return
        if self._options.no_prefect:
            raise ConfigError("block:NAME stands in Prefect: leave --no-prefect out")
        self._choose_server()
        if self._server is not None:
            self._server.wait_healthy(self._config.fault_tolerance.start_timeout_s)
        from blocks.resolve import resolve

        self._recorded = self._config
        resolved = asyncio.run(resolve(self._config))
        os.environ.update(resolved.environment)
        self._config = resolved.config

    def _tell_finished(self, choice: RunChoice) -> int:
        """Nothing is to be trained: only sends what metrics a tracker lacks, and tells Prefect."""
        from flows.launch import deliver

        try:
            self._tell_prefect(choice.run_id)
        finally:
            self._end()

        self._tell(choice, "is finished: nothing was started", deliver(self._config, choice.run_id))
        return 0

    def _tell_prefect(self, run_id: str) -> None:
        """Ends what Prefect still shows as running of a run that has finished."""
        workspace = self._workspace
        if self._options.no_prefect:
            return
        own = self._own_prefect and api_url_of(workspace) is None
        if own and not shown_as_running(workspace.resolve() / "prefect", run_id):
            return
        self._choose_server()
        if self._server is not None:
            self._server.wait_healthy(self._config.fault_tolerance.start_timeout_s)
        from flows.prefect_api import complete_finished

        asyncio.run(complete_finished(run_id))

    def _tell(self, choice: RunChoice, how: str, notes: list[str]) -> None:
        self._terminal.close()
        home = self._workspace.resolve() / "prefect"
        shown = home if self._own_prefect and home.is_dir() else None
        for line in summary(self._config, choice.run_id, how, shown, notes):
            self._terminal.say(line)

    def _refuse_what_is_running(self, choice: RunChoice) -> None:
        """Says at once, before any process is started, that the run has a living owner."""
        from flows.launch import store_of
        from slime_core.run.epoch import refuse_living_owner

        if choice.resumed and not self._options.take_over:
            refuse_living_owner(store_of(self._config, choice.run_id))

    def _parts(self) -> list[str]:
        prefect = [] if self._options.no_prefect else ["Prefect"]
        debug = self._config.debug
        trainer = [] if debug.debug_rollout_only else ["trainer"]
        engines = [] if debug.debug_train_only else ["engines"]
        return [*prefect, "Ray", *trainer, "rollout worker", *engines]

    def _paths(self, choice: RunChoice) -> RunPaths:
        return RunPaths(self._workspace.absolute(), choice.run_id)

    def _which(self) -> str:
        return "never" if self._options.new else (self._options.run_id or "auto")

    def _start(self, choice: RunChoice) -> Launch:
        """Starts Prefect's server and the run's processes side by side."""
        if not self._options.no_prefect:
            self._choose_server()
            self._imports.start()
        from flows.launch import Launch

        take_over = self._options.take_over
        launch = Launch.start(
            self._config, self._which(), take_over, choice, self._terminal, self._recorded,
            lambda lease: self._stopper.gives_back(lease.release),
        )  # fmt: skip
        if not self._options.no_prefect:
            self._imports.join()
        quiet_console(self._terminal.say, self._paths(choice).logs / "prefect.log")
        return launch

    def _choose_server(self) -> None:
        """Takes the user's Prefect API, else that of `slime up`, else starts our own; then points
        the client there."""
        if self._server is not None:
            return
        chosen = configured_api_url()
        if chosen is None and (service := api_url_of(self._workspace)):
            home = self._workspace.resolve() / "prefect"
            os.environ.update(client_environment(service, home))
            return
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
        """Trains; ends the processes also where Prefect did not come up."""
        task = asyncio.ensure_future(self._body(launch))
        self._stopper.watch(task, launch.release)
        try:
            await task
        finally:
            stopped = self._stopper.exit_code is not None
            await launch.close("interrupted" if stopped else "failed")
            if launch.flow_run_id is not None and stopped:
                from flows.prefect_api import mark_stopped

                await mark_stopped(launch.flow_run_id)

    async def _body(self, launch: Launch) -> None:
        from flows.launch import LAUNCH, plain_training

        LAUNCH.set(launch)
        if self._options.no_prefect:
            await plain_training(launch)
            return
        from flows.prefect_api import API_ERRORS, settle_lost
        from flows.train import train

        watch = asyncio.ensure_future(self._keep_server())
        try:
            if self._server is not None:
                limit_s = self._config.fault_tolerance.start_timeout_s
                await asyncio.to_thread(self._server.wait_healthy, limit_s)
            self._terminal.up("Prefect")
            await train(hidden(self._config))  # what is trained stands in the launch
            if self._server_restarts and launch.flow_run_id is not None:
                await settle_lost(launch.flow_run_id)
        except API_ERRORS as error:
            if not launch.finished:
                raise ServerError(f"Prefect's API failed: {error}") from error
            watch.cancel()
            await self._tell_end_late(launch.run_id, error)
        finally:
            watch.cancel()

    async def _tell_end_late(self, run_id: str, error: Exception) -> None:
        """Ends what our server shows as running where it was away when the run finished."""
        log.warning("Prefect was not told that the run has finished: %s", error)
        if self._server is None:
            return
        from flows.prefect_api import complete_finished

        try:
            if not self._server.alive:
                self._server = self._server.restarted()
            limit_s = self._config.fault_tolerance.start_timeout_s
            await asyncio.to_thread(self._server.wait_healthy, limit_s)
        except ServerError as gone:
            log.warning("the next start tells it: %s", gone)
            return
        await complete_finished(run_id)

    async def _keep_server(self) -> None:
        """Starts our server again should it end before the run does."""
        while self._server is not None:
            await asyncio.sleep(WATCH_S)
            if not self._server.alive:
                log.warning("Prefect's server ended: starting it again")
                self._server = self._server.restarted()
                self._server_restarts += 1

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
