"""Python code of a model in a sandbox: bubblewrap with namespaces of its own for everything.

Inside there is no network, no other process to see, nothing of the machine but the Python
installation (read-only), and one small folder in memory to write to. The code runs as one process
(a system call filter lets it start threads only), so its address space is all the memory it gets,
and when it ends or is ended nothing of it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from slime_core.errors import ConfigError, DeadlineError
from slime_core.tools.syscall_filter import MACHINES, one_process_filter
from slime_core.waits import Deadline

SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin")
LOADER = ("/etc/ld.so.cache", "/etc/alternatives")
PROBE_S = 10.0
BEGIN_S = 5.0
END_S = 30.0  # the kernel clears away what a program left in /tmp, however much
CHUNK_BYTES = 1 << 16
LOOK_S = 0.02
"""How often threads and files are counted: no limit of the kernel holds for them where root runs
this, and what a program can start in that time does no harm."""
TOO_MANY = {
    "threads": "import threading as t\nfor _ in range(9): t.Thread(target=t.Event().wait).start()",
    "files": "for n in range(20): open(f'/tmp/{n}', 'w')\nimport time\ntime.sleep(60)",
}
"""Programs that pass a limit that is counted from outside."""
LIMITED = (
    'ulimit -c 0; ulimit -n 64; ulimit -t "$1"; ulimit -v "$2"; ulimit -f "$3"; shift 3; exec "$@"'
)
"""Sets limits and becomes the program; FSIZE is in blocks of 512 bytes, memory in kB."""


@dataclass(frozen=True)
class Limits:
    """What code may use.

    Attributes:
        time_s: from its start to its end.
        memory_bytes: address space of its process.
        scratch_bytes: what it may write to /tmp, which lies in memory.
        output_bytes: of each of its outputs.
        threads: at once; a program that starts more is ended.
        files: files and folders in /tmp, whose names take memory too; likewise.
    """

    time_s: float = 10.0
    memory_bytes: int = 1 << 30
    scratch_bytes: int = 64 << 20
    output_bytes: int = 1 << 20
    threads: int = 64
    files: int = 10_000


@dataclass(frozen=True)
class Ran:
    """What code did.

    Attributes:
        exit_code: as of a shell; None where it was ended from outside.
        ended: why: `time`, `output`, `threads` or `files`; None where it came to an end by itself.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    ended: str | None = None

    @property
    def well(self) -> bool:
        return self.exit_code == 0


def run_python(code: str, stdin: str = "", limits: Limits | None = None) -> Ran:
    """Runs a program to its end or to one of its limits.

    Raises:
        ConfigError: there is no sandbox on this machine, or it does not start.
    """
    box = _Box(code, stdin, limits or Limits())
    try:
        return box.finish()
    finally:
        box.end()


async def run_python_async(code: str, stdin: str = "", limits: Limits | None = None) -> Ran:
    """`run_python` for an event loop; when it is cancelled the program has ended."""
    box = _Box(code, stdin, limits or Limits())
    work = asyncio.ensure_future(asyncio.to_thread(box.finish))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.to_thread(box.kill)
        await asyncio.gather(work, return_exceptions=True)
        raise
    finally:
        await asyncio.to_thread(box.end)  # it may have to wait for the kernel


def require_sandbox() -> None:
    """Raises ConfigError, with what is missing, where code cannot be sandboxed."""
    problem = _problem()
    if problem is not None:
        raise ConfigError(problem)


@lru_cache(maxsize=1)
def _problem() -> str | None:
    """Why no code can be run here, from a try; None where it can."""
    if platform.machine() not in MACHINES:
        return f"code is sandboxed on {' and '.join(MACHINES)} only, not on {platform.machine()}"
    if _bwrap() is None:
        return "code of a model runs in a sandbox only: install bubblewrap (the command bwrap)"
    try:
        ran = run_python("print(1)", limits=Limits(time_s=PROBE_S))
        if ran.stdout != "1\n":
            return f"the sandbox does not run Python: {ran.ended or ran.stderr.strip()[-300:]}"
        for what, code in TOO_MANY.items():
            ended = run_python(code, limits=Limits(time_s=PROBE_S, threads=2, files=9)).ended
            if ended != what:
                return (
                    f"{what} of a program in the sandbox cannot be counted: this process must be "
                    "allowed to look into /proc of the processes that it starts"
                )
    except ConfigError as error:
        return str(error)
    return None


def _bwrap() -> str | None:
    return shutil.which("bwrap")


class _Box:
    """One program in its sandbox."""

    def __init__(self, code: str, stdin: str, limits: Limits) -> None:
        program = _bwrap()
        if program is None:
            raise ConfigError(str(_problem()))
        self._limits = limits
        self._seen: psutil.Process | None = None
        self._gone: Deadline | None = None
        self._ends_s = time.monotonic() + limits.time_s
        code_fd, stdin_fd = _in_memory(code.encode()), _in_memory(stdin.encode())
        filter_fd = _in_memory(one_process_filter(platform.machine()))
        self._status = _in_memory(b"")
        command = [program, *_walls(limits), "--ro-bind-data", str(code_fd), "/main.py",
                   "--remount-ro", "/", "--seccomp", str(filter_fd),
                   "--json-status-fd", str(self._status), "--", *_program(limits)]  # fmt: skip
        try:
            self._process = subprocess.Popen(
                command, stdin=stdin_fd, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                pass_fds=(code_fd, filter_fd, self._status), env={},
            )  # fmt: skip
        finally:
            for fd in (code_fd, stdin_fd, filter_fd):
                os.close(fd)

    def finish(self) -> Ran:
        """Waits for the end of the program, or brings it about. Raises ConfigError where it never
        began."""
        outputs, ended = self._read()
        if ended is not None:
            self.kill()
        self._await_end()
        stdout, stderr = (bytes(data).decode(errors="replace") for data in outputs)
        if ended is not None:
            return Ran(stdout, stderr, None, ended)
        status = self._said()
        if "exit-code" not in status:
            raise ConfigError(f"bubblewrap cannot make a sandbox: {stderr.strip()[-300:]}")
        return Ran(stdout, stderr, status["exit-code"])

    def kill(self) -> None:
        """Ends the first process of the sandbox, and so everything in it.

        To end bubblewrap alone is not enough: while it sets up, its child does not notice.
        """
        deadline = Deadline("bubblewrap to say which process it started", BEGIN_S)
        while self._process.poll() is None and not deadline.expired:
            child = self._said().get("child-pid")
            if child is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                break
            time.sleep(0.002)
        self._process.kill()

    def _await_end(self) -> None:
        self._gone = self._gone or Deadline("bubblewrap to end", END_S)  # once, not at every call
        try:
            self._process.wait(self._gone.remaining_s)
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(
                f"bubblewrap (process {self._process.pid}) has not ended {END_S:g} s after its "
                "program did: look at the kernel's log, its file system may hang"
            ) from error

    def end(self) -> None:
        """Leaves nothing open and nothing running."""
        try:
            if self._process.poll() is None:
                self.kill()
            self._await_end()
        finally:
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            if self._status >= 0:
                os.close(self._status)
                self._status = -1

    def _read(self) -> tuple[list[bytearray], str | None]:
        """Both outputs, and the limit that they or the time reached."""
        pipes = [self._process.stdout, self._process.stderr]
        outputs = [bytearray(), bytearray()]
        with selectors.DefaultSelector() as waiting:
            for pipe, data in zip(pipes, outputs, strict=True):
                assert pipe is not None
                waiting.register(pipe, selectors.EVENT_READ, data)
            while waiting.get_map():
                if passed := self._passed():
                    return outputs, passed
                for key, _ in waiting.select(LOOK_S):
                    chunk = os.read(key.fd, CHUNK_BYTES)
                    if not chunk:
                        waiting.unregister(key.fileobj)
                    key.data.extend(chunk)
                    if len(key.data) > self._limits.output_bytes:
                        del key.data[self._limits.output_bytes :]
                        return outputs, "output"
        while True:  # outputs may be closed long before the end
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LOOK_S)
                return outputs, None
            if passed := self._passed():
                return outputs, passed

    def _passed(self) -> str | None:
        """The limit that the program has passed, None while it keeps within all of them."""
        if time.monotonic() >= self._ends_s:
            return "time"
        with contextlib.suppress(OSError, psutil.Error):  # it begins or ends right now
            program = self._program()
            if program is None:
                return None
            if program.num_threads() > self._limits.threads:
                return "threads"
            scratch = os.statvfs(Path("/proc", str(program.pid), "root", "tmp"))
            if scratch.f_files - scratch.f_ffree > self._limits.files:
                return "files"
        return None

    def _program(self) -> psutil.Process | None:
        """The program as seen from outside: the child of the sandbox's first process."""
        first = self._said().get("child-pid") if self._seen is None else None
        if first is not None:
            self._seen = next(iter(psutil.Process(first).children()), None)
        return self._seen

    def _said(self) -> dict[str, Any]:
        """What bubblewrap tells of the program."""
        said: dict[str, Any] = {}
        for line in os.pread(self._status, CHUNK_BYTES, 0).splitlines():
            said |= json.loads(line)
        return said


def _walls(limits: Limits) -> Sequence[str]:
    """Namespaces, and the file system that the program sees."""
    words = ["--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534",
             "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox",
             "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp",
             "--setenv", "LANG", "C.UTF-8", "--setenv", "OMP_NUM_THREADS", "1",
             "--setenv", "PYTHONHASHSEED", "0"]  # fmt: skip
    words += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev", "--chdir", "/tmp",
              "--size", str(limits.scratch_bytes), "--tmpfs", "/tmp"]  # fmt: skip
    for path in SYSTEM:
        if Path(path).is_symlink():
            words += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).is_dir():
            words += ["--ro-bind", path, path]
    for path in LOADER:
        words += ["--ro-bind-try", path, path]
    for path in dict.fromkeys((sys.base_prefix, sys.prefix)):
        if not Path(path).is_relative_to("/usr"):
            words += ["--ro-bind", path, path]
    return words


def _program(limits: Limits) -> Sequence[str]:
    numbers = (int(limits.time_s) + 1, limits.memory_bytes >> 10, limits.scratch_bytes >> 9)
    return [
        "/bin/sh",
        "-c",
        LIMITED,
        "sh",
        *map(str, numbers),
        sys.executable,
        "-I",
        "-B",
        "/main.py",
    ]


def _in_memory(data: bytes) -> int:
    """A file that lies nowhere, open at its beginning."""
    fd = os.memfd_create("sandbox", 0)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
