"""What code in the sandbox cannot do; every test runs a program in a real one."""

import asyncio
import os
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from slime_core.errors import ConfigError
from slime_core.tools import sandbox
from slime_core.tools.interface import ToolCall, execute, load_tools
from slime_core.tools.sandbox import Limits, require_sandbox, run_python, run_python_async


def missing() -> str:
    try:
        require_sandbox()
    except ConfigError as error:
        return str(error)
    return ""


boxed = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a sandbox")
SHORT = Limits(time_s=5.0)


BOMB = """
import ctypes, mmap, signal, threading, time
room = mmap.mmap(-1, 64 << 20)
stacks = ctypes.addressof(ctypes.c_char.from_buffer(room)) + 4096
libc = ctypes.CDLL(None)
threading.stack_size(32768)

def clone(flags, stack):  # threads that Python does not count
    libc.clone(libc.pause, ctypes.c_void_p(stack & ~15), flags, None)

for i in range(100_000):
    {start}
"""


def said(code: str, limits: Limits = SHORT) -> str:
    ran = run_python(code, limits=limits)
    return (ran.stdout + ran.stderr).strip().splitlines()[-1] if ran.ended is None else ran.ended


def descendants() -> set[int]:
    return {one.pid for one in psutil.Process().children(recursive=True)}


@boxed
def test_a_program_reads_prints_and_fails_as_programs_do():
    ran = run_python("import sys\nprint(sys.stdin.read().upper())\nsys.exit(3)", "grüße")
    assert (ran.stdout, ran.stderr, ran.exit_code, ran.ended) == ("GRÜSSE\n", "", 3, None)
    assert said("1/0") == "ZeroDivisionError: division by zero"
    assert said("import numpy; print(numpy.arange(3).sum())", Limits(time_s=20)) == "3"


@boxed
def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        assert said(code).startswith("ConnectionRefusedError"), "this loopback is another one"
    assert "Network is unreachable" in said(
        "import socket; socket.create_connection(('192.0.2.1', 80), 2)")  # fmt: skip
    assert said("import socket; print([name for _, name in socket.if_nameindex()])") == "['lo']"


@boxed
def test_nothing_of_the_machine_can_be_written_and_little_can_be_read(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    home = Path.home() / "slime-sandbox-was-here"
    for path in (secret, home):
        assert "FileNotFoundError" in said(f"open({str(path)!r}, 'r+')")
    for path in ("/usr/bin/x", "/bin/x", "/x", "/dev/x", "/dev/shm/x", "/main.py"):
        assert "Error" in said(f"open({path!r}, 'w')"), path
    assert said("import os; print(sorted(os.environ))") == str(
        ["HOME", "LANG", "OMP_NUM_THREADS", "PATH", "PWD", "PYTHONHASHSEED"])  # fmt: skip
    assert said("open('a', 'w').write('b'); print(open('/tmp/a').read())") == "b"
    assert not home.exists() and secret.read_text() == "x"


@boxed
def test_no_other_process_can_be_seen_or_made():
    assert "PermissionError" in said("import os; os.fork()")
    assert "PermissionError" in said("import subprocess; subprocess.run(['/bin/true'])")
    libc = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); "
    assert said(libc + "print(libc.unshare(0x10000000), ctypes.get_errno())") == "-1 1"
    numbers = "print(sorted(int(one) for one in os.listdir('/proc') if one.isdigit()))"
    assert said(f"import os; {numbers}") == "[1, 2]"
    threads = "import threading; t = threading.Thread(target=print, args=('well',)); t.start()"
    assert said(threads) == "well", "threads are no processes"


@boxed
@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("x = bytearray(400 << 20)", "MemoryError"),
        ("x = b''\nwhile True: x += bytes(32 << 20)", "MemoryError"),
        ("import mmap; mmap.mmap(-1, 400 << 20)", "OSError: [Errno 12] Cannot allocate memory"),
        ("for i in range(99): open(str(i), 'wb').write(bytes(1 << 20))",
         "OSError: [Errno 28] No space left on device"),
        ("open('a', 'wb').write(bytes(9 << 20))", "OSError: [Errno 27] File too large"),
        ("import os; os.memfd_create('a')", "PermissionError: [Errno 1] Operation not permitted"),
        ("while True: print('x' * 10000)", "output"),
        (BOMB.format(start="threading.Thread(target=time.sleep, args=(60,)).start()"), "threads"),
        (BOMB.format(start="clone(0x10f00, stacks + 512 * i)"), "threads"),
        ("import os\nfor i in range(9 ** 9): os.mkdir(str(i))", "files"),
        ("import os\nwhile True: os.mkdir('d'); os.chdir('d')", "files"),
        ("import os\nfor i in range(9 ** 9): os.fork()",
         "PermissionError: [Errno 1] Operation not permitted"),
    ],
)  # fmt: skip
def test_memory_disk_and_output_have_an_end(code, answer):
    limits = Limits(time_s=20.0, memory_bytes=256 << 20, scratch_bytes=8 << 20)
    assert said(code, limits) == answer


@boxed
def test_time_has_an_end_and_nothing_survives_it():
    before = descendants()
    begun_s = time.monotonic()
    deaf = ("import signal, os, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n"
            "os.close(1); os.close(2)\ntime.sleep(60)")  # fmt: skip
    ran = run_python(deaf, limits=Limits(time_s=1.0))
    assert ran.ended == "time" and 0.9 < time.monotonic() - begun_s < 40
    assert descendants() == before


@boxed
@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_a_cancelled_run_ends_its_program_however_far_it_has_come(wanted):
    before = descendants()  # of other tests
    started: list[psutil.Process] = []

    async def body():
        task = asyncio.create_task(run_python_async("import time; time.sleep(60)"))
        while len(descendants() - before) < wanted:
            await asyncio.sleep(0.001)
        started.extend(psutil.Process(pid) for pid in descendants() - before)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    begun_s = time.monotonic()
    asyncio.run(body())
    assert descendants() <= before and time.monotonic() - begun_s < 40
    _, alive = psutil.wait_procs(started, timeout=15)
    assert started and all(one.status() == psutil.STATUS_ZOMBIE for one in alive)


@boxed
def test_clearing_away_after_a_program_does_not_hold_the_loop(monkeypatch):
    begun, go_on, waited = threading.Event(), threading.Event(), []
    end = sandbox._Box.end

    def slow(box):
        begun.set()
        waited.append(go_on.wait(20))
        end(box)

    monkeypatch.setattr(sandbox._Box, "end", slow)

    async def body():
        task = asyncio.create_task(run_python_async("print(1)"))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        go_on.set()
        return await task

    assert asyncio.run(body()).stdout == "1\n" and waited == [True]


@boxed
def test_the_python_tool_answers_with_what_was_printed():
    tools = load_tools(["python"])
    assert list(tools["python"].parameters["properties"]) == ["code"]

    def call(code):
        return asyncio.run(execute(tools, ToolCall("python", {"code": code}), 20.0))

    assert call("print(6*7)") == "42\n"
    assert call("print(1); 1/0").startswith("error: exit code 1\n1\nTraceback")


def test_without_bubblewrap_it_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(sandbox, "_bwrap", lambda: None)
    sandbox._problem.cache_clear()
    try:
        with pytest.raises(ConfigError, match="install bubblewrap"):
            load_tools(["python"])
        with pytest.raises(ConfigError, match="install bubblewrap"):
            run_python("print(1)")
    finally:
        sandbox._problem.cache_clear()


def test_a_bubblewrap_that_cannot_work_says_why(monkeypatch, tmp_path):
    stand_in = tmp_path / "bwrap"
    stand_in.write_text("#!/bin/sh\necho 'bwrap: No permissions to create namespace' >&2; exit 1\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sandbox, "_bwrap", lambda: os.fspath(stand_in))
    sandbox._problem.cache_clear()
    try:
        with pytest.raises(ConfigError, match="cannot make a sandbox: bwrap: No permissions"):
            require_sandbox()
    finally:
        sandbox._problem.cache_clear()


@boxed
@pytest.mark.parametrize("what", ["threads", "files"])
def test_where_a_limit_cannot_be_counted_there_is_no_sandbox(monkeypatch, what):
    programs = {  # which end by themselves, so that no time is waited for
        "threads": "import threading as t, time\nfor _ in range(9): "
                   "t.Thread(target=time.sleep, args=(0.5,)).start()",
        "files": "for n in range(20): open(f'/tmp/{n}', 'w')",
    }  # fmt: skip
    monkeypatch.setattr(sandbox, "TOO_MANY", {what: programs[what]})
    if what == "threads":
        monkeypatch.setattr(psutil.Process, "children", lambda self: [])
    else:
        monkeypatch.setattr(sandbox.os, "statvfs", lambda path: Path("/proc/none").stat())
    sandbox._problem.cache_clear()
    try:
        with pytest.raises(ConfigError, match=f"{what} of a program in the sandbox cannot be"):
            require_sandbox()
    finally:
        sandbox._problem.cache_clear()
