"""What `slime reap` says."""

from __future__ import annotations

import pytest

from flows.cli import reap as command
from flows.cli.main import main
from slime_core.cluster import reaping
from slime_core.cluster.reaping import Reaped
from slime_core.cluster.supervisor import About


@pytest.fixture
def answers(monkeypatch):
    """Has the cluster answer so, and returns what it was asked."""
    asked: list[tuple[str, str]] = []

    def answer(reaped: Reaped) -> list[tuple[str, str]]:
        monkeypatch.setattr(command, "_reachable", lambda address: address)
        monkeypatch.setattr(
            reaping, "reap", lambda address, run: asked.append((address, run)) or reaped
        )
        return asked

    return answer


def test_the_address_is_the_flag_else_the_variable_else_auto(answers, monkeypatch, capsys):
    asked = answers(Reaped(None))
    assert main(["reap", "r", "--address", "ray://head:10001"]) == 0
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert main(["reap", "r"]) == 0
    monkeypatch.delenv("RAY_ADDRESS")
    assert main(["reap", "r"]) == 0
    assert asked == [("ray://head:10001", "r"), ("head:6379", "r"), ("auto", "r")]
    assert capsys.readouterr().out.count("has nothing of a run r") == 3


def test_it_says_whose_run_it_was_and_what_it_ended(answers, capsys):
    about = About("r", "file:///w/store/r", 3, "process 9 on vm", 47.2, "n", "h", "0.1.0")
    answers(Reaped("r", about, ["trainer-0 (process 5)", "engine-0 (process 6)"]))
    assert main(["reap", "r", "--address", "auto"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert "file:///w/store/r" in said[0] and "process 9 on vm, which was heard 47 s ago" in said[0]
    assert said[1:3] == ["ended trainer-0 (process 5)", "ended engine-0 (process 6)"]
    assert said[3].startswith("nothing of run r is on the Ray cluster auto any more")


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", "cannot be reached: Connection refused"),
        ("ray://127.0.0.1:1", "cannot be reached: Connection refused"),
        ("ray://127.0.0.1", "cannot be reached"),
        ("local", "--address local: give HOST:PORT, auto or ray://HOST:10001"),
        ("http://head:8265", "give HOST:PORT, auto or ray://"),
    ],
)
def test_a_cluster_that_cannot_be_reached_is_one_sentence(address, sentence, capsys):
    assert main(["reap", "r", "--address", address]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
