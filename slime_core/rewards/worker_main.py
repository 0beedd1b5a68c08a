"""The process that runs graders: `python -m slime_core.rewards.worker_main MEMORY_BYTES`.

It reads one JSON request a line from its standard input and answers with one JSON line for
"ready" and one for each item. Graders get an empty standard input and find standard error under
standard output, so that nothing they print can be taken for an answer.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from slime_core.plugins.user_code import raised
from slime_core.rewards.result import plain

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MAX_MESSAGE_CHARS = 500
MAX_FRAMES = 30


class SoftTimeout(BaseException):
    """Raised by the alarm inside a grader; no `except Exception` of a grader can swallow it."""


def main() -> None:
    memory_bytes, parent = int(sys.argv[1]), int(sys.argv[2])
    _tie_to(parent)
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGALRM, _alarm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    me = os.getpid()
    for line in requests:
        _answer(json.loads(line), answers, me)
        _end_children()


def _answer(request: dict[str, Any], answers: Any, me: int) -> None:
    def say(message: dict[str, Any]) -> None:
        if os.getpid() != me:  # A grader forked and let the child run on into this code.
            os._exit(1)
        answers.write(json.dumps(message).encode() + b"\n")

    try:
        function = _function(request["target"], json.dumps(request.get("args") or {}))
    except Exception as error:
        say({"ready": False, "message": _shown(error)})
        return
    say({"ready": True})
    for item in request["items"]:
        say(_graded(function, item, request["timeout_s"]))


def _graded(function: Callable[..., Any], item: list[Any], timeout_s: float) -> dict[str, Any]:
    """The answer for one item: its value, or a reason and a message."""
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            value = function(*item)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return {"value": plain(value)}
    except SoftTimeout:
        return {"reason": "timeout", "message": f"took more than {timeout_s:g} s"}
    except MemoryError:
        return {"reason": "memory", "message": "ran out of the memory a grader may use"}
    except BaseException as error:
        reason = getattr(error, "reward_reason", "exception")
        trace = "".join(traceback.format_tb(error.__traceback__, -MAX_FRAMES))
        return {"reason": reason, "message": _shown(error), "trace": trace}


@lru_cache(maxsize=64)
def _function(target: str, args_json: str) -> Callable[..., Any]:
    """A built-in grader by name, or `custom:` and an import path."""
    kind, _, name = target.partition(":")
    if kind == "grader":
        from slime_core.rewards.registry import grader_named

        return grader_named(name).function()
    from types import SimpleNamespace

    from slime_core.plugins.load import load
    from slime_core.rewards.registry import REWARD_NAMES
    from slime_core.sample import Sample

    function, args = load(name, REWARD_NAMES), SimpleNamespace(**json.loads(args_json))
    return lambda sample: function(args, Sample.from_dict(sample))


def _shown(error: BaseException) -> str:
    return raised(error)[:MAX_MESSAGE_CHARS]


def _alarm(signum: int, frame: Any) -> None:
    raise SoftTimeout


def _tie_to(parent: int) -> None:
    """Dies with the parent, and adopts what graders leave behind so that it can be ended."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)


def _end_children() -> None:
    """Ends every process that a grader has started."""
    for _ in range(100):
        children = [
            int(pid)
            for task in Path("/proc/self/task").iterdir()
            for pid in (task / "children").read_text().split()
        ]
        if not children:
            return
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
