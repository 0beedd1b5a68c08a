"""Command lines, and real processes: starts, failures, ends, and who dies with whom."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from slime_core.engines import launcher
from slime_core.engines.embedded.options import parse_options
from slime_core.engines.launcher import (
    EMBEDDED_OPTIONS,
    H200_OPTIONS,
    EngineProcess,
    embedded_command,
    engine_process,
    free_port,
    sglang_command,
)
from slime_core.errors import ConfigError, DeadlineError, EngineError
from slime_core.waits import poll

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\n"
STUBBORN += "while True: time.sleep(1)"


def ended(pid: int, seconds: float = 15.0) -> None:
    """Waits until a process has ended."""

    def gone() -> bool | None:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE or None
        except psutil.NoSuchProcess:
            return True

    poll(f"process {pid} to end", seconds, gone)


def process(command: list[str], tmp_path, port: int | None = None) -> EngineProcess:
    return EngineProcess(command, f"http://127.0.0.1:{port or free_port()}", tmp_path / "log")


# -- command lines


def test_embedded_command_is_understood_by_the_engine():
    command = embedded_command(
        "/m", 31000, {"random_seed": 7, "enable_deterministic_inference": True, "tp_size": 4}
    )
    assert command[:3] == [sys.executable, "-m", "slime_core.engines.embedded"]
    options = parse_options(command[3:])
    assert (options.model_path, options.port, options.random_seed) == ("/m", 31000, 7)
    assert options.deterministic and options.parent_pid == os.getpid()


def test_every_embedded_option_is_a_flag_of_the_engine():
    values = {"enable_deterministic_inference": True, "device": "cpu", "dtype": "float32"}
    values |= {"log_level": "error", "tokenizer_path": "/t", "served_model_name": "x"}
    values |= {"weight_version": "v", "enable_return_routed_experts": True}
    options = {name: values.get(name, 5) for name in EMBEDDED_OPTIONS}
    parse_options(embedded_command("/m", 31000, options)[3:])


def test_sglang_command_with_the_flags_that_ran_on_an_h200():
    command = sglang_command("/m", 31000, H200_OPTIONS)
    assert command[command.index("--") + 1 :] == [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", "/m", "--host", "127.0.0.1", "--port", "31000"),
        *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
        *("--grammar-backend", "none", "--mem-fraction-static", "0.3"),
        *("--cuda-graph-max-bs-decode", "32", "--disable-prefill-cuda-graph"),
    ]
    assert command[1:5] == ["-m", "slime_core.engines.guard", "--parent-pid", str(os.getpid())]


def test_sglang_command_gives_only_what_was_given():
    command = sglang_command("/m", 1, {"a": None, "b": False, "c": True, "d_e": [1, 2]})
    assert command[-4:] == ["--c", "--d-e", "1", "2"]
    assert command[-5] == "1"
    with pytest.raises(ConfigError, match="port is set by the launcher"):
        sglang_command("/m", 1, {"port": 2})


def test_unknown_kind():
    with pytest.raises(ConfigError, match="embedded or sglang, got 'vllm'"):
        engine_process("vllm", "/m", 1, "log")


def test_option_values_are_checked():
    for argv in (["--port", "0"], ["--max-running-requests", "0"], ["--prot", "1"], []):
        with pytest.raises(SystemExit) as caught:
            parse_options([*argv, "--model-path", "/m"] if argv else [])
        assert caught.value.code == 2


def test_seeds_of_two_engines_differ_unless_deterministic():
    one, two = (parse_options(["--model-path", "/m"]).random_seed for _ in range(2))
    assert one != two
    fixed = ["--model-path", "/m", "--enable-deterministic-inference"]
    assert parse_options(fixed).random_seed == parse_options(fixed).random_seed


# -- processes


def test_start_wait_terminate(tmp_path):
    port = free_port()
    engine = process([sys.executable, "-c", SERVER, str(port)], tmp_path, port)
    assert not engine.alive and engine.terminate() is None
    engine.start()
    with pytest.raises(EngineError, match="runs already"):
        engine.start()
    engine.wait_healthy(240)
    assert engine.alive and engine.returncode is None
    assert os.getpgid(engine.pid) == engine.pid  # a Ctrl-C at the terminal does not reach it
    assert engine.terminate(10) == -signal.SIGTERM
    assert not engine.alive
    engine.start()
    engine.wait_healthy(240)
    assert engine.kill() == -signal.SIGKILL


def test_a_free_port_is_none_that_the_kernel_gives_away_by_itself(monkeypatch):
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = [free_port() for _ in range(200)]
    assert not [port for port in found if first <= port <= last]
    assert len(set(found)) > 190
    other = next(port for port in found if port != found[0])
    draws = iter([found[0] - launcher.FIRST_PORT] * 3 + [other - launcher.FIRST_PORT])
    monkeypatch.setattr(launcher.secrets, "randbelow", lambda below: next(draws))
    with socket.create_server(("127.0.0.1", found[0])):
        assert free_port() == other


def test_where_the_kernel_leaves_no_others_it_chooses_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "AUTOMATIC_PORTS", tmp_path / "none")
    assert free_port() > 1024


def test_an_early_death_quotes_the_log(tmp_path):
    engine = process([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path)
    engine.start()
    with pytest.raises(EngineError, match=r"ended with status 1; the end of .*\n.*no such model"):
        engine.wait_healthy(240)
    engine.kill()


def test_never_healthy_meets_the_deadline(tmp_path):
    engine = process([sys.executable, "-c", STUBBORN], tmp_path)
    engine.start()
    poll("the child to say that it is up", 20, lambda: engine.log_tail() or None)
    with pytest.raises(DeadlineError, match=r"to be healthy; the end of .*\nup"):
        engine.wait_healthy(0.2)
    begun = time.monotonic()
    assert engine.terminate(0.3) == -signal.SIGKILL
    assert time.monotonic() - begun < 30


def test_a_program_that_does_not_exist(tmp_path):
    with pytest.raises(EngineError, match="cannot be started"):
        process(["/no/such/program"], tmp_path).start()


def test_the_child_does_not_die_with_the_thread_that_started_it(tmp_path):
    port = free_port()
    engine = process([sys.executable, "-c", SERVER, str(port)], tmp_path, port)
    thread = threading.Thread(target=engine.start)
    thread.start()
    thread.join()
    engine.wait_healthy(240)
    engine.kill()


GUARD = [sys.executable, "-m", "slime_core.engines.guard", "--parent-pid"]
FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_guard_ends_the_whole_family_with_the_parent():
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    guard = subprocess.Popen(
        [*GUARD, str(parent.pid), "--", sys.executable, "-c", FAMILY],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert guard.stdout is not None
    grandchild = int(guard.stdout.readline())
    parent.kill()
    parent.wait()
    assert guard.wait(15) == 128 + signal.SIGTERM
    ended(grandchild)


def test_guard_passes_on_a_stop_and_the_status():
    sleep = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"]
    guard = subprocess.Popen(
        [*GUARD, str(os.getpid()), "--", *sleep], stdout=subprocess.PIPE, text=True
    )
    assert guard.stdout is not None and guard.stdout.readline() == "up\n"
    guard.terminate()
    assert guard.wait(15) == 128 + signal.SIGTERM
    done = [*GUARD, str(os.getpid()), "--", sys.executable, "-c", "raise SystemExit(3)"]
    assert subprocess.run(done, timeout=30).returncode == 3


def test_guard_killed_takes_its_child_along():
    guard = subprocess.Popen(
        [*GUARD, str(os.getpid()), "--", sys.executable, "-c", FAMILY],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert guard.stdout is not None and guard.stdout.readline()
    (child,) = psutil.Process(guard.pid).children()
    grandchildren = child.children()
    guard.kill()
    guard.wait()
    ended(child.pid)
    for process in grandchildren:
        process.kill()


# -- the embedded engine as a process


def start_embedded(tmp_path, model_path, port: int, **options) -> EngineProcess:
    engine = engine_process("embedded", str(model_path), port, tmp_path / "log", options)
    engine.start()
    return engine


def test_a_port_in_use_is_one_sentence(tmp_path, model_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = start_embedded(tmp_path, model_path, port)
        assert poll("the engine to give up", 20, lambda: engine.returncode) == 2
    text = engine.log_tail()
    assert text.startswith(f"error: port {port} on 127.0.0.1 cannot be used (Address already in")
    assert "choose another with --port" in text and "Traceback" not in text


@pytest.mark.parametrize(
    ("options", "says"),
    [({"context_length": 100000}, "--context-length 100000 is more than the model's 256 tokens")],
)
def test_bad_options_are_one_sentence(tmp_path, model_path, options, says):
    engine = start_embedded(tmp_path, model_path, free_port(), **options)
    assert poll("the engine to give up", 60, lambda: engine.returncode) == 2
    assert engine.log_tail().splitlines()[-1] == f"error: {says}"


def test_a_folder_without_a_model_is_one_sentence(tmp_path):
    engine = start_embedded(tmp_path, tmp_path, free_port())
    assert poll("the engine to give up", 60, lambda: engine.returncode) == 2
    assert "config.json does not exist" in engine.log_tail()
    assert "Traceback" not in engine.log_tail()


def test_the_engine_ends_with_its_parent(tmp_path, model_path):
    """The parent starts it from a thread that ends at once, then is killed."""
    port = free_port()
    script = f"""
import threading, time
from slime_core.engines.launcher import engine_process
engine = engine_process("embedded", {str(model_path)!r}, {port}, {str(tmp_path / "log")!r})
thread = threading.Thread(target=engine.start)
thread.start()
thread.join()
engine.wait_healthy(240)
print(engine.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    parent.wait()
    ended(pid, 3)
