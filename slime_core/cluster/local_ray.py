"""A Ray that belongs to this process and ends with it, however it ends."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants

from slime_core.cluster import reaper
from slime_core.cluster.engine_maker import EngineMaker
from slime_core.cluster.ray_output import log_to_details
from slime_core.cluster.spawner import EngineOrder
from slime_core.engines.launcher import EngineProcess, free_port
from slime_core.errors import ConfigError, EngineError

log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 100 * 2**20
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
FOLDER_PREFIX = "slime-ray-"
STOP_GRACE_S = 1.0
REAPER_TIMEOUT_S = 5.0
STARTS = 2
"""Ray gives its node 30 s, a constant of its own, which a busy machine may need more than once."""


class LocalRay:
    """Starts and ends one local Ray.

    Ray's processes end with the thread that started them, so a thread of its own starts them and
    waits for `stop`. Whoever waits for that thread can be interrupted meanwhile: Ray's own start
    does not look at signals for seconds.

    Args:
        note: a file that names Ray's temporary folder while it is there, so that the next start
            can remove what a kill of everything at once left.
    """

    def __init__(self, note: Path) -> None:
        self._note = note
        self._folder = ""
        self._restore_logger: Callable[[], None] = lambda: None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._keeper: ThreadPoolExecutor | None = None
        self._engines = EngineMaker()
        self.makes_engines = False

    def start(self) -> None:
        """Starts Ray and the reaper that ends it should this process be killed.

        Raises:
            ConfigError: this process uses a Ray already.
            EngineError: it did not come up.
        """
        if ray.is_initialized():
            raise ConfigError(
                "Ray is in use in this process already, and a run starts a Ray of its own: call "
                "ray.shutdown() first, or start the run in another process"
            )
        os.environ.update(QUIET)
        # Else Ray's C++ core takes SIGTERM past Python, prints a stack and aborts 3 s later. The
        # variable of this name would have to be set before Ray is imported, and reach its workers.
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
        for left in reversed(range(STARTS)):
            try:
                return self._start_node()
            except EngineError as error:
                if not left or "timed out" not in str(error):
                    raise
                log.warning("%s; trying again", error)
                self._end_node()

    def _start_node(self) -> None:
        self._remove_noted()
        self._folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX)  # socket paths must be short
        self._note.write_text(self._folder, encoding="utf-8")
        self._reaper = reaper.start(self._folder)
        self._restore_logger = log_to_details()
        with reaper.marking(self._folder):
            self._in_a_lasting_thread(
                ray.init,
                address="local",
                num_cpus=max(2, os.cpu_count() or 1),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                log_to_driver=False,
                _temp_dir=self._folder,
            )

    def spawn(
        self, name: str, actor_class: type, options: Mapping[str, Any], *arguments: Any
    ) -> Any:
        """Creates an actor without waiting for it; returns its handle."""
        return ray.remote(**options)(actor_class).remote(*arguments)

    def engine(self, order: EngineOrder) -> EngineProcess:
        """A server that is not started yet, a child of this process and not of Ray."""
        return self._engines.make(order)

    def port(self) -> int:
        """A port for the ranks to meet on."""
        return free_port()

    def stop(self) -> None:
        """Ends the Ray that was started here, if one was, and waits for its processes: actors
        that were told to end may hold a GPU a little longer."""
        self._engines.release()
        if self._folder:
            self._end_node()

    def _end_node(self) -> None:
        try:
            ray.shutdown()
        finally:
            if not reaper.sweep(self._folder, STOP_GRACE_S):
                log.warning("processes of Ray in %s could not be ended", self._folder)
            if self._reaper is not None:
                self._reaper.kill()
                self._reaper.wait(REAPER_TIMEOUT_S)
            if self._keeper is not None:
                self._keeper.shutdown(wait=False)
            self._folder = ""
            self._remove_noted()
            self._restore_logger()

    def _in_a_lasting_thread(self, call: Callable[..., object], **options: Any) -> None:
        self._keeper = ThreadPoolExecutor(1, "ray")
        try:
            self._keeper.submit(call, **options).result()
        except Exception as error:  # Ray raises plain Exception where its node does not come up
            raise EngineError(f"Ray could not be started on this machine: {error}") from error

    def _remove_noted(self) -> None:
        if not self._note.exists():
            return
        folder = Path(self._note.read_text(encoding="utf-8"))
        if folder.name.startswith(FOLDER_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
        self._note.unlink()
