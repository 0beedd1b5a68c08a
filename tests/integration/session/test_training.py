"""A whole run through the stages: killed, started again, continued, and audited from its files."""

import json
import os
import signal
from pathlib import Path

import pytest

from slime_core.run.audit import audit
from slime_core.tracking.registry import find
from slime_core.words import counted
from tests.integration.session.conftest import held, marked

KILLED_WITHIN_S = 8.0
ENDED_WITHIN_S = 1.0
GROUPS = 4


@pytest.mark.slow  # the kill chain holds the same promise through the command
def test_a_run_is_killed_in_mid_segment_and_goes_on_to_its_end(drive, tmp_path: Path):
    first = drive(3)
    began, table = first.lines()
    run_id = began["run"]
    assert table["next"] == "iteration 0: begins"
    first.wait_nothing_left(ENDED_WITHIN_S)

    killed = drive(5, hold="generate-middle@3")
    worker = held(tmp_path, "generate-middle@3", killed)
    processes = marked(killed.mark)
    names = " ".join(process.name() for process in processes)
    assert "gcs_server" in names and "raylet" in names and len(processes) > 5
    assert worker in [process.pid for process in processes], "the worker is held, not the driver"
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait(5)
    killed.wait_nothing_left(KILLED_WITHIN_S)

    last = drive(5)
    resumed, table = last.lines()
    assert resumed["run"] == run_id and "after 3 iterations" in resumed["sentence"]
    assert table["done before"] == "3 iterations"
    assert table["trainer"] == "the checkpoint after iteration 2", "nothing is trained again"
    assert not {"note", "damaged"} & table.keys()
    assert table["changed"] == "from iteration 3 on: num_rollout 3 -> 5"
    kept = int(table["samples"].split()[0])
    assert 0 < kept < GROUPS, "it was killed between two groups"
    left = f"{GROUPS - kept} to be generated"
    assert table["samples"] == f"{counted(kept, 'finished group')} kept, {left}"
    last.wait_nothing_left(ENDED_WITHIN_S)

    found = audit(tmp_path / "w" / "store" / run_id)
    assert found.sound, found.problems
    assert (found.iterations, found.trained, found.draws) == (5, 5 * GROUPS, 5 * GROUPS)
    assert found.open == found.dropped == found.unused == 0

    metrics = tmp_path / "w" / "local" / run_id / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    written = {name for record in records for name in record["metrics"]}
    entries = {name: find(name) for name in written}
    unknown = [n for n, e in entries.items() if e is None or e.name.endswith("/{name}")]
    assert not unknown and len(written) > 40, "every metric has an entry of its own"
    assert len(records) == 5, "one record an iteration, none doubled and none missing"
    assert not (tmp_path / "w" / "local" / run_id / "ray-folder").exists(), "nothing left in /tmp"
