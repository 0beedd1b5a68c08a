"""Runs a trial in a process that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

from slime_core.errors import PluginError


def try_out(name: str, path: str, config: str | None, limit_s: float) -> list[str]:
    """What a function did in its trial, a line each.

    Raises:
        PluginError: what is wrong with it, in one sentence.
    """
    command = [sys.executable, "-m", "slime_core.contracts.child", name, path]
    child = subprocess.Popen(
        [*command, config] if config else command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p or str(os.getcwd()) for p in sys.path)},  # noqa: PTH109
    )
    try:
        out, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise PluginError(
            f"{path} did not end within {limit_s:g} s (--timeout-s); a run would go on without it "
            "where it can, and grade or generate nothing"
        ) from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    if not out.endswith(b"\n"):
        raise PluginError(f"{path} ended its process {_how(child.returncode)}; it must return")
    result = json.loads(out.splitlines()[-1])
    if "error" in result:
        raise PluginError(result["error"])
    return result["lines"]


def _how(status: int) -> str:
    if status < 0:
        return f"by signal {signal.Signals(-status).name}"
    return f"with status {status}"
