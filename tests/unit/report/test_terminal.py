"""The progress line says what a person asks: where, how good, how fast, how long still."""

import io
import subprocess
import sys

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
        "1 of 10 done (iteration 0)  36 s left  reward 0.438  eval greedy 0.500 sampled 0.250  "
        "1234 tokens/s  generate 0.51 train 0.25 sync 0.10 s"
    )
    assert second.startswith("2 of 10 done (iteration 1)  32 s left")


def test_the_pace_follows_the_last_iterations(monkeypatch):
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr(module, "time", clock)
    shown = Terminal(100, stream)
    shown.start()
    for k in range(50):
        clock.now += 100.0 if k < 29 else 1.0
        shown.iteration(k, {})
    assert stream.getvalue().splitlines()[-1] == "50 of 100 done (iteration 49)  50 s left"


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
    assert lines[-1].startswith("2 of 2 done (iteration 1)")


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (60, "13 of 60 done (iteration 12)  3 min 08 s left"),
        (80, "13 of 60 done (iteration 12)  3 min 08 s left  now generate 13  reward 0.438"),
        (
            120,
            "13 of 60 done (iteration 12)  3 min 08 s left  now generate 13  reward 0.438  "
            "eval greedy 0.500 sampled 0.250",
        ),
    ],
)
def test_a_narrow_terminal_keeps_what_matters_most(monkeypatch, width, shown):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    terminal = Terminal(60, io.StringIO(), width=width)
    terminal.start()
    terminal.evaluation({"eval/greedy": 0.5, "eval/sampled": 0.25})
    clock.now += 4.0
    terminal.iteration(12, METRICS)
    terminal.stage("generate", 13)
    assert terminal.line() == shown and len(shown) <= width


def test_a_start_says_what_it_waits_for(monkeypatch):
    clock, stream = Clock(), io.StringIO()
    monkeypatch.setattr(module, "time", clock)
    terminal = Terminal(60, stream)
    terminal.starting(["Ray", "trainer", "engines"])
    clock.now += 6.0
    terminal.up("Ray")
    terminal.up("Ray")
    terminal.up("something else")
    assert terminal.line() == "starting, 6 s: waiting for trainer, engines"
    clock.now += 3.0
    terminal.up("trainer")
    terminal.up("engines")
    assert terminal.line().startswith("starting, 9 s: bringing trainer and engines")
    assert stream.getvalue().splitlines() == [
        "starting Ray, trainer, engines",
        "  Ray up after 6 s",
        "  trainer up after 9 s",
        "  engines up after 9 s",
    ]
    terminal.stage("evaluate", -1)
    assert terminal.line() == "now evaluate initial weights"


def test_a_run_without_iterations_ends_with_its_scores():
    stream = io.StringIO()
    terminal = Terminal(0, stream)
    terminal.evaluation({"eval/greedy": 0.5, "eval/sampled": 0.25})
    terminal.close()
    terminal.close()
    assert stream.getvalue() == "eval greedy 0.500 sampled 0.250\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_equal_rewards_are_told_once():
    stream = io.StringIO()
    terminal = Terminal(4, stream, live=False)
    for k in range(3):
        terminal.iteration(k, {"rollout/raw_reward": 0.0, "rollout/raw_reward/std": 0.0})
    told = [line for line in stream.getvalue().splitlines() if "same reward (0)" in line]
    assert len(told) == 1 and told[0].startswith("iteration 0: ")
    stream = io.StringIO()
    terminal = Terminal(4, stream, live=False)
    terminal.iteration(0, {"rollout/raw_reward": 0.5, "rollout/raw_reward/std": 0.5})
    assert "same reward" not in stream.getvalue()


def test_a_run_goes_on_where_nobody_reads_any_more():
    """`slime train ... | head -1`: the reader is gone after the first line."""
    program = (
        "import sys; from slime_core.report.terminal import Terminal; t = Terminal(3)\n"
        "t.say('first'); sys.stdin.readline()\n"
        "for k in range(3): t.iteration(k, {})\n"
        "t.close(); print('the end', file=sys.stderr)"
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdin and process.stdout and process.stderr
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    told, last = process.stderr.read().splitlines()
    assert told.startswith("nobody reads the progress any more") and last == "the end"
    assert process.wait(20) == 0
