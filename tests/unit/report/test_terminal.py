"""The progress line says what a person asks: where, how good, how fast, how long still."""

import io

import pytest

from slime_core.report import terminal as module
from slime_core.report.terminal import Terminal, duration

METRICS = {
    "rollout/raw_reward": 0.4375,
    "perf/tokens_per_gpu_per_sec": 1234.4,
    "perf/rollout_time": 0.512,
    "perf/train_time": 0.25,
    "perf/update_weights_time": 0.1,
}


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_plain_lines_have_every_number_and_the_time_left(monkeypatch):
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr(module, "time", clock)
    shown = Terminal(10, stream)
    shown.start()
    shown.evaluation({"eval/greedy": 0.5, "eval/sampled": 0.25, "eval/greedy/reward": 0.5})
    for k in range(2):
        shown.stage("generate", k)
        clock.now += 4.0
        shown.iteration(k, METRICS)
    shown.close()
    first, second = stream.getvalue().splitlines()
    assert first == (
        "iteration 1/10  reward 0.438  eval greedy 0.500 sampled 0.250  1234 tokens/s  "
        "generate 0.51 train 0.25 sync 0.10 s  36 s left"
    )
    assert second.startswith("iteration 2/10") and second.endswith("32 s left")


def test_the_pace_follows_the_last_iterations(monkeypatch):
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr(module, "time", clock)
    shown = Terminal(100, stream)
    shown.start()
    for k in range(50):
        clock.now += 100.0 if k < 29 else 1.0
        shown.iteration(k, {})
    assert stream.getvalue().splitlines()[-1] == "iteration 50/100  50 s left"


def test_the_scores_of_the_last_evaluation_stay():
    stream = io.StringIO()
    shown = Terminal(3, stream)
    for score in (0.25, 0.75):
        shown.evaluation({"eval/sort": score})
        shown.iteration(0, {})
    shown.iteration(2, {})
    scores = [line.split("eval sort ")[1][:5] for line in stream.getvalue().splitlines()]
    assert scores == ["0.250", "0.750", "0.750"]


def test_a_live_line_is_redrawn_and_the_last_one_stays():
    stream = io.StringIO()
    shown = Terminal(2, stream, live=True)
    shown.say("starting run r")
    shown.stage("generate", 0)
    shown.iteration(0, METRICS)
    shown.iteration(1, METRICS)
    shown.close()
    shown.close()
    lines = [line for line in stream.getvalue().splitlines() if line.strip()]
    assert lines[0].endswith("starting run r")
    assert lines[-1].startswith("iteration 2/2")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
