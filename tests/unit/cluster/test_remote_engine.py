"""An engine behind a supervisor, also when that has gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_core.cluster.remote_engine import RemoteEngine
from slime_core.errors import EngineError


def gone(*_: Any, **__: Any) -> Any:
    raise EngineError("the supervisor of the run on the cluster has gone")


def test_calls_are_passed_on_with_time_for_the_way_back():
    seen: list[tuple[Any, ...]] = []

    def call(*words: Any, limit_s: float = 0.0) -> int:
        seen.append((*words, limit_s))
        return 7

    engine = RemoteEngine("http://127.0.0.1:1", Path("engine-0.log"), call, lambda: (5, True, None))
    engine.start()
    engine.wait_healthy(240)
    assert engine.terminate() == 7
    assert [words[0] for words in seen] == ["start", "wait_healthy", "terminate"]
    assert seen[1][1] == 240 and seen[1][2] > 240, "its own error comes before ours"
    assert (engine.pid, engine.alive, engine.returncode) == (5, True, None)


def test_an_engine_has_ended_where_its_supervisor_has_gone():
    engine = RemoteEngine("http://127.0.0.1:1", Path("engine-0.log"), gone, gone)
    assert not engine.alive and engine.pid is None
    assert engine.terminate() is None
    with pytest.raises(EngineError, match="has gone"):
        engine.wait_healthy(1.0)
