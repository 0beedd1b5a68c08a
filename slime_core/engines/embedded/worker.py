"""The thread that owns the model: it runs steps, and commands between them."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from slime_core.engines.embedded.request import Request
from slime_core.engines.embedded.scheduler import Scheduler

log = logging.getLogger(__name__)
T = TypeVar("T")
Progress = list[tuple[Request, int]]
"""Requests that got a token or ended, with the number of output tokens at that moment."""
FATAL_EXIT_CODE = 70


class EngineWorker(threading.Thread):
    """Runs the scheduler. Commands are served in order, between two steps."""

    def __init__(self, scheduler: Scheduler, report: Callable[[Progress], None]) -> None:
        """
        Args:
            scheduler: used by this thread alone from now on.
            report: called on this thread with what streams or ended in a step.
        """
        super().__init__(name="engine", daemon=True)
        self.paused = False
        self._scheduler = scheduler
        self._report = report
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def call(self, command: Callable[[Scheduler], T]) -> Future[T]:
        """Runs `command(scheduler)` between two steps; its error goes into the future."""
        future: Future[T] = Future()

        def run() -> None:
            # Nobody waits any more, for example a health check that ran into its deadline.
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(command(self._scheduler))
            except Exception as error:
                future.set_exception(error)

        self._commands.put(run)
        return future

    def submit(self, requests: list[Request]) -> None:
        self._commands.put(lambda: self._scheduler.submit(requests))

    def abort(self, hit: Callable[[Request], bool]) -> Future[int]:
        """Ends matching requests and reports them; gives their number."""

        def end(scheduler: Scheduler) -> int:
            ended = scheduler.abort(hit)
            self._report([(request, len(request.output)) for request in ended])
            return len(ended)

        return self.call(end)

    def pause(self, retract: bool) -> Future[None]:
        """Stops stepping; with `retract` running requests lose their keys and values."""

        def stop(scheduler: Scheduler) -> None:
            self.paused = True
            if retract:
                scheduler.retract()

        return self.call(stop)

    def resume(self) -> Future[None]:
        def go(_: Scheduler) -> None:
            self.paused = False

        return self.call(go)

    def run(self) -> None:
        try:
            while True:
                self._serve_commands()
                touched = self._scheduler.step()
                news = [
                    (request, len(request.output))
                    for request in touched
                    if request.stream or request.finish is not None
                ]
                if news:
                    self._report(news)
                if self._scheduler.step_pause_s:
                    time.sleep(self._scheduler.step_pause_s)
        except BaseException:
            log.critical("the engine thread failed", exc_info=True)
            end_process(FATAL_EXIT_CODE)

    def _serve_commands(self) -> None:
        """Runs what is queued; while there is nothing to step, waits for the next command."""
        while True:
            wait = self.paused or self._scheduler.idle
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            command()


def end_process(code: int) -> Any:
    """Ends the process at once: a server without its engine must not look alive."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(code)
