"""Engine processes: their command lines, their start, their end.

Who dies with whom. A parent-death signal (PR_SET_PDEATHSIG) fires when the *thread* that made the
child ends, so an engine started from a pool thread would die with that thread. Both kinds of
engine follow the parent *process* instead: the embedded engine watches --parent-pid itself, and
SGLang runs under `engines.guard`, which watches for it and ends its whole process group.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from slime_core.errors import ConfigError, DeadlineError, EngineError
from slime_core.waits import Deadline

log = logging.getLogger(__name__)
OptionValue = str | int | float | bool | None | list[str] | list[int]
EMBEDDED_OPTIONS = frozenset(
    {
        "tokenizer_path",
        "served_model_name",
        "random_seed",
        "max_running_requests",
        "max_prefill_tokens",
        "context_length",
        "enable_deterministic_inference",
        "enable_return_routed_experts",
        "device",
        "dtype",
        "weight_version",
        "log_level",
    }
)
H200_OPTIONS: dict[str, OptionValue] = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.3,
    "cuda_graph_max_bs_decode": 32,
    "disable_prefill_cuda_graph": True,
}
"""SGLang 0.5.17 on one H200: started with these, without flashinfer and FA3."""
TAIL_LINES = 20
FIRST_PORT, PORT_ATTEMPTS = 15_000, 100
AUTOMATIC_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
POLL_S = 0.05


def embedded_command(
    model_path: str, port: int, options: Mapping[str, OptionValue], host: str = "127.0.0.1"
) -> list[str]:
    """The command of an embedded engine; SGLang options without a meaning here are left out."""
    known = {name: value for name, value in options.items() if name in EMBEDDED_OPTIONS}
    ignored = sorted(options.keys() - known.keys())
    if ignored:
        log.info("the embedded engine ignores the SGLang options %s", ", ".join(ignored))
    return [
        *(sys.executable, "-m", "slime_core.engines.embedded"),
        *("--model-path", model_path, "--host", host, "--port", str(port)),
        *("--parent-pid", str(os.getpid())),
        *_flags(known),
    ]


def sglang_command(
    model_path: str, port: int, options: Mapping[str, OptionValue], host: str = "127.0.0.1"
) -> list[str]:
    """The command of an SGLang server under the guard.

    Args:
        options: ServerArgs fields; True gives a bare flag, False and None give nothing.
    """
    for name in ("model_path", "host", "port"):
        if name in options:
            raise ConfigError(f"the SGLang option {name} is set by the launcher; remove it")
    return [
        *(sys.executable, "-m", "slime_core.engines.guard", "--parent-pid", str(os.getpid()), "--"),
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", model_path, "--host", host, "--port", str(port)),
        *_flags(options),
    ]


def _flags(options: Mapping[str, OptionValue]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if isinstance(value, list):
            words.extend(str(item) for item in value)
        elif value is not True:
            words.append(str(value))
    return words


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now. Another process may take it before it is used, but hardly does: the
    port lies below those that the kernel gives to connections and to servers that ask for any.

    Raises:
        OSError: none could be had.
    """
    end = _first_automatic_port()
    for left in reversed(range(PORT_ATTEMPTS)):
        chosen = FIRST_PORT + secrets.randbelow(end - FIRST_PORT) if end > FIRST_PORT else 0
        with socket.socket() as probe:
            try:
                probe.bind((host, chosen))
            except OSError:
                if not left:
                    raise
            else:
                return probe.getsockname()[1]
    raise AssertionError("the loop above returns or raises")


def _first_automatic_port() -> int:
    """The lowest port that the kernel chooses by itself; 0 where it does not say."""
    try:
        return int(AUTOMATIC_PORTS.read_text().split()[0])
    except OSError:
        return 0


class EngineProcess:
    """One engine process and its log file. All methods may be called from any thread."""

    def __init__(
        self,
        command: list[str],
        url: str,
        log_path: str | Path,
        env: Mapping[str, str] | None = None,
        threads: int = 1,
    ) -> None:
        """
        Args:
            command: from embedded_command or sglang_command.
            url: where it will serve.
            log_path: its stdout and stderr are appended there.
            env: variables on top of this process's environment.
            threads: OMP_NUM_THREADS of the child; spinning threads of several engines on few
                cores cost more than they give.
        """
        self.command = command
        self.url = url.rstrip("/")
        self.log_path = Path(log_path)
        self._env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._env.update(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Starts the process in a session of its own: a Ctrl-C at the terminal must not reach it.

        Raises:
            EngineError: it runs already, or the program or log file cannot be opened.
        """
        if self.alive:
            raise EngineError(f"the engine at {self.url} runs already (pid {self.pid})")
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = self.log_path.open("ab")
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                start_new_session=True,
            )
        except OSError as error:
            self._close_log()
            raise EngineError(f"the engine at {self.url} cannot be started: {error}") from error

    def wait_healthy(self, deadline_s: float) -> None:
        """Blocks until /health answers 200.

        Raises:
            EngineError: it was not started, or ended; quotes the last lines of its log.
            DeadlineError: not healthy in time; quotes them too.
        """
        deadline = Deadline(f"the engine at {self.url} to be healthy", deadline_s)
        while not self._healthy(min(5.0, max(0.1, deadline.remaining_s))):
            if not self.alive:
                raise EngineError(
                    f"the engine at {self.url} ended with status {self.returncode}; "
                    f"the end of {self.log_path}:\n{self.log_tail()}"
                )
            if deadline.expired:
                raise DeadlineError(
                    f"waited {deadline_s:.0f} s for {deadline.name}; "
                    f"the end of {self.log_path}:\n{self.log_tail()}"
                )
            time.sleep(POLL_S)

    def terminate(self, deadline_s: float = 10.0) -> int | None:
        """Asks the process to end, and kills it when it has not in time; returns its status."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                log.warning("the engine at %s ignored SIGTERM for %.0f s", self.url, deadline_s)
        return self.kill()

    def kill(self, deadline_s: float = 10.0) -> int | None:
        """Kills the process and what it started, and reaps it; returns its status."""
        process = self._process
        if process is None:
            return None
        # The group outlives its leader while members are left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            status = process.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(
                f"waited {deadline_s:.0f} s for the killed engine at {self.url} (pid {process.pid})"
            ) from error
        self._close_log()
        return status

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of the log."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(max(0, self.log_path.stat().st_size - 16384))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(text.splitlines()[-lines:])

    def _healthy(self, timeout_s: float) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.url}/health", timeout=timeout_s) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def engine_process(
    kind: str,
    model_path: str,
    port: int,
    log_path: str | Path,
    options: Mapping[str, Any] | None = None,
    host: str = "127.0.0.1",
    threads: int = 1,
    env: Mapping[str, str] | None = None,
) -> EngineProcess:
    """An engine that is not started yet.

    Args:
        kind: "embedded" or "sglang".
        options: SGLang's option names without dashes.

    Raises:
        ConfigError: an unknown kind.
    """
    commands = {"embedded": embedded_command, "sglang": sglang_command}
    if kind not in commands:
        raise ConfigError(f"engine kind must be embedded or sglang, got {kind!r}")
    command = commands[kind](model_path, port, options or {}, host)
    return EngineProcess(command, f"http://{host}:{port}", log_path, env, threads)
