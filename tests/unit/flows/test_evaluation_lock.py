"""Evaluations of one run tell the trackers one after another, and none waits for ever."""

import pytest

from flows import evaluate
from slime_core.errors import DeadlineError


def test_a_second_evaluation_waits_with_a_deadline_and_goes_on_after_the_first(
    tmp_path, monkeypatch
):
    lock = tmp_path / "lock"
    with evaluate._alone(lock):
        monkeypatch.setattr(evaluate, "ALONE_TIMEOUT_S", 0.2)
        with (
            pytest.raises(DeadlineError, match=r"another evaluation to tell the trackers \(.*lock"),
            evaluate._alone(lock),
        ):
            pass
    with evaluate._alone(lock):
        assert lock.exists()
