"""Runs a command that must not outlive a given process: python -m ... --parent-pid P -- COMMAND.

For servers that cannot watch their parent themselves. The command gets a process group of its
own; when the parent ends, or this process is told to stop, the whole group is ended.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading

from slime_core.engines.lifetime import die_with_thread, watch_parent

STOP_WITHIN_S = 8.0


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status (128 + n for signal n)."""
    parser = argparse.ArgumentParser(prog="python -m slime_core.engines.guard")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("a command is needed behind --")
    # Only this thread starts children, and it lives as long as the process: here the signal that
    # follows the starting thread is right, and it covers a kill of this process.
    child = subprocess.Popen(command, process_group=0, preexec_fn=die_with_thread)

    def end(sign: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, sign)

    def stop() -> None:
        end(signal.SIGTERM)
        timer = threading.Timer(STOP_WITHIN_S, end, (signal.SIGKILL,))
        timer.daemon = True
        timer.start()

    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: stop())
    watch_parent(options.parent_pid, stop)
    status = child.wait()
    end(signal.SIGKILL)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
