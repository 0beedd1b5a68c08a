"""What a person sees in the terminal: one live line, or one plain line an iteration."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

STAGE_TIMES = {
    "generate": "perf/rollout_time",
    "train": "perf/train_time",
    "sync": "perf/update_weights_time",
}
PACE_WINDOW = 20


class Terminal:
    """Prints the progress of a run.

    Args:
        total: iterations of the whole run.
        stream: where to write.
        live: redraw one line; by default where the stream is a terminal.
    """

    def __init__(self, total: int, stream: TextIO | None = None, live: bool | None = None) -> None:
        self._total = total
        self._stream = stream or sys.stdout
        self._scores: dict[str, float] = {}
        self._ends: deque[float] = deque(maxlen=PACE_WINDOW + 1)
        self._line = ""
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True)
        wanted = self._stream.isatty() if live is None else live
        self._live = Live(console=self._console, transient=True, auto_refresh=False)
        self._is_live = wanted
        if wanted:
            self._live.start()

    def say(self, text: str) -> None:
        """Prints lines that stay."""
        self._console.print(text, markup=False)
        self._stream.flush()

    def stage(self, name: str, iteration: int) -> None:
        """Shows what is going on now (live only)."""
        if self._is_live:
            now = f"{name} {iteration + 1}"
            self._redraw(f"{self._line}  |  {now}" if self._line else now)

    def start(self) -> None:
        """Starts the clock of the first iteration."""
        self._ends.append(time.monotonic())

    def evaluation(self, metrics: dict[str, float]) -> None:
        """Remembers the mean reward of each dataset."""
        for name, value in metrics.items():
            if name.startswith("eval/") and name.count("/") == 1:
                self._scores[name.removeprefix("eval/")] = value

    def iteration(self, k: int, metrics: dict[str, float]) -> None:
        """Shows a finished iteration."""
        self._ends.append(time.monotonic())
        self._line = self._describe(k, metrics)
        if self._is_live:
            self._redraw(self._line)
        else:
            self.say(self._line)

    def close(self) -> None:
        """Leaves the last line standing."""
        if self._is_live:
            self._live.stop()
            self._is_live = False
            if self._line:
                self.say(self._line)

    def _redraw(self, text: str) -> None:
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _describe(self, k: int, metrics: dict[str, float]) -> str:
        parts = [f"iteration {k + 1}/{self._total}"]
        if (reward := metrics.get("rollout/raw_reward")) is not None:
            parts.append(f"reward {reward:.3f}")
        if self._scores:
            scores = " ".join(f"{name} {value:.3f}" for name, value in self._scores.items())
            parts.append(f"eval {scores}")
        if (speed := metrics.get("perf/tokens_per_gpu_per_sec")) is not None:
            parts.append(f"{speed:.0f} tokens/s")
        times = [
            f"{stage} {metrics[name]:.2f}" for stage, name in STAGE_TIMES.items() if name in metrics
        ]
        if times:
            parts.append(" ".join(times) + " s")
        if (left := self._seconds_left(k)) is not None:
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)

    def _seconds_left(self, k: int) -> float | None:
        """Remaining iterations at the pace of the last ones."""
        if len(self._ends) < 2:
            return None
        pace_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return pace_s * max(0, self._total - k - 1)


def duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
