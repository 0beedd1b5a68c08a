"""What a person sees in the terminal: one live line, or one plain line an iteration.

Iterations are named as everywhere else, from 0; how many are done is a count.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

log = logging.getLogger(__name__)
STAGE_TIMES = {
    "generate": "perf/rollout_time",
    "train": "perf/train_time",
    "sync": "perf/update_weights_time",
}
PACE_WINDOW = 20
REDRAWS_PER_S = 2
SEPARATOR = "  "


class _Output(Console):
    """Falls silent where nobody reads any more (a closed pipe or terminal): a training does not end
    for want of a reader."""

    def on_broken_pipe(self) -> None:
        if self.quiet:
            return
        self.quiet = True
        log.warning("nobody reads the progress any more; the run goes on without showing it")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # Python's last flush would fail, too
        os.close(nowhere)


class Terminal:
    """Prints the progress of a run.

    Args:
        total: iterations of the whole run.
        stream: where to write.
        live: redraw one line; by default where the stream is a terminal.
        width: columns of the live line; by default those of the terminal, whenever it is drawn.
    """

    def __init__(
        self,
        total: int,
        stream: TextIO | None = None,
        live: bool | None = None,
        width: int | None = None,
    ) -> None:
        self._total = total
        self._stream = stream or sys.stdout
        self._scores: dict[str, float] = {}
        self._ends: deque[float] = deque(maxlen=PACE_WINDOW + 1)
        self._progress: list[str] = []
        self._now = ""
        self._told_no_signal = False
        self._start: _Start | None = None
        self._console = _Output(file=self._stream, highlight=False, soft_wrap=True, width=width)
        wanted = self._stream.isatty() if live is None else live
        self._live = Live(
            console=self._console,
            transient=True,
            refresh_per_second=REDRAWS_PER_S,
            get_renderable=lambda: Text(self.line(), no_wrap=True, overflow="ellipsis"),
        )
        self._is_live = wanted
        if wanted:
            self._live.start()

    def say(self, text: str) -> None:
        """Prints lines that stay."""
        try:
            self._console.print(text, markup=False)
            self._stream.flush()
        except OSError:
            self._console.on_broken_pipe()

    def starting(self, parts: Sequence[str]) -> None:
        """Begins to show which of these parts are waited for."""
        self._start = _Start(parts)
        if not self._is_live:
            self.say(f"starting {', '.join(parts)}")

    def up(self, part: str) -> None:
        """A part has come up."""
        if self._start is None or not self._start.come(part):
            return
        if not self._is_live:
            self.say(f"  {part} up after {duration(self._start.seconds)}")

    def stage(self, name: str, iteration: int) -> None:
        """Shows what is going on now (live only)."""
        self._start = None
        self._now = f"{name} {iteration}" if iteration >= 0 else f"{name} initial weights"

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
        self._start, self._now = None, ""
        self._ends.append(time.monotonic())
        self._progress = self._describe(k, metrics)
        if not self._is_live:
            self.say(SEPARATOR.join(self._progress))
        self._tell_without_signal(k, metrics)

    def _tell_without_signal(self, k: int, metrics: dict[str, float]) -> None:
        """Says once that equal rewards teach nothing: most often the reward function is wrong."""
        reward = metrics.get("rollout/raw_reward")
        if reward is None or metrics.get("rollout/raw_reward/std") != 0.0 or self._told_no_signal:
            return
        self._told_no_signal = True
        self.say(
            f"iteration {k}: every sample has the same reward ({reward:g}), so nothing can be "
            "learnt from it; look at the reward function and at the responses it sees"
        )

    def close(self) -> None:
        """Leaves the last line standing, or the scores where nothing was trained."""
        was_live, self._is_live = self._is_live, False
        if was_live:
            self._live.stop()
        if was_live and self._progress:
            self.say(SEPARATOR.join(self._progress))
        elif not self._progress and self._scores:
            self.say(self._evaluated())
        self._scores = {}

    def line(self) -> str:
        """The live line: what is least important stands last and is left out first."""
        if self._start is not None:
            return self._start.describe()
        parts = list(self._progress)
        if self._now:
            parts.insert(min(2, len(parts)), f"now {self._now}")
        while len(parts) > 1 and len(SEPARATOR.join(parts)) > self._console.width:
            parts.pop()
        return SEPARATOR.join(parts)

    def _describe(self, k: int, metrics: dict[str, float]) -> list[str]:
        """What there is to say about iteration k, the most important first."""
        parts = [f"{k + 1} of {self._total} done (iteration {k})"]
        if (left := self._seconds_left(k)) is not None:
            parts.append(f"{duration(left)} left")
        if (reward := metrics.get("rollout/raw_reward")) is not None:
            parts.append(f"reward {reward:.3f}")
        if self._scores:
            parts.append(self._evaluated())
        if (speed := metrics.get("perf/tokens_per_gpu_per_sec")) is not None:
            parts.append(f"{speed:.0f} tokens/s")
        times = [
            f"{stage} {metrics[name]:.2f}" for stage, name in STAGE_TIMES.items() if name in metrics
        ]
        if times:
            parts.append(" ".join(times) + " s")
        return parts

    def _evaluated(self) -> str:
        return "eval " + " ".join(f"{name} {value:.3f}" for name, value in self._scores.items())

    def _seconds_left(self, k: int) -> float | None:
        """Remaining iterations at the pace of the last ones."""
        if len(self._ends) < 2:
            return None
        pace_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return pace_s * max(0, self._total - k - 1)


class _Start:
    """Which parts of a start have come up, and how long it has taken so far."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._there = dict.fromkeys(parts, False)
        self._began_s = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began_s

    def come(self, part: str) -> bool:
        """Notes a part; True if it was waited for."""
        news = self._there.get(part) is False
        if news:
            self._there[part] = True
        return news

    def describe(self) -> str:
        time_so_far = duration(self.seconds)
        if all(self._there.values()):
            return f"starting, {time_so_far}: bringing trainer and engines to the same weights"
        missing = [part for part, there in self._there.items() if not there]
        return f"starting, {time_so_far}: waiting for {', '.join(missing)}"


def duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
