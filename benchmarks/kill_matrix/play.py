"""Plays one case: starts the run, kills what the case names, resumes, has the result audited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.kill_matrix.audit_databases import (
    audit_metrics_file,
    audit_mlflow,
    audit_prefect,
)
from benchmarks.kill_matrix.audit_store import (
    Acknowledged,
    acknowledged,
    audit_store,
    differences,
)
from benchmarks.kill_matrix.cases import (
    ENDS_WITH_THE_RUN,
    EVAL_INTERVAL,
    ITERATIONS,
    SAVE_INTERVAL,
    Case,
    Kill,
)
from benchmarks.kill_matrix.places import RUN_ID, FilePlace, Place, open_place
from benchmarks.kill_matrix.victims import CASE_VARIABLE, alive, below, kill, marked, victims

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
DATASET_ROWS = 40  # the six iterations draw 96 prompts: two data epochs end
EVALUATED = set(range(0, ITERATIONS + 1, EVAL_INTERVAL))
FLAGS = (
    *("--run-id", RUN_ID, "--num-rollout", str(ITERATIONS), "--eval-interval", str(EVAL_INTERVAL)),
    *("--save-interval", str(SAVE_INTERVAL), "--sglang-enable-deterministic-inference"),
)
WAIT_S, DEATH_S, LOOK_S, LOOK_AT_PROCESSES_S = 300.0, 30.0, 0.05, 0.5
TAIL_CHARS = 3000
NO_KILL = "no kill met the run"


class CaseError(Exception):
    """The case cannot go on; says why."""


@dataclass
class Played:
    """What happened in a case.

    Attributes:
        problems: every fault, as a sentence; a case without any has passed.
        kills: for each kill that met: what it was, how the run went on (`resume`, `in place`), and
            the seconds from the resume (or the kill) to the next ledger, None without one.
        resumes: how often the command was started again.
        seconds: of the whole case.
    """

    problems: list[str] = field(default_factory=list)
    kills: list[dict[str, Any]] = field(default_factory=list)
    resumes: int = 0
    seconds: float = 0.0


def play(case: Case, workspace: Path, untouched: Path) -> Played:
    """Plays a case in a new workspace.

    Args:
        untouched: store folder of a run that nobody killed.
    """
    played, start_s = Played(), time.monotonic()
    workspace.mkdir(parents=True)
    with open_place(case.store, workspace) as place:
        run = _Run(workspace, place, played)
        try:
            run.holds = [one.hold for one in case.kills if one.hold is not None]
            run.start()
            for one in case.kills:
                run.meet(one)
            run.finish()
            played.problems += audited(workspace, place.folder(), run.seen)
            played.problems += differences(place.folder(), untouched)
        except (CaseError, OSError, ValueError, KeyError) as error:
            # What cannot even be read is a finding like any other.
            played.problems.append(f"{type(error).__name__}: {error}")
        finally:
            run.end_everything()
            if played.problems:
                place.folder()  # what the store held stays beside the workspace's other files
    if len(played.kills) == 0:
        played.problems.append(NO_KILL)
    played.seconds = round(time.monotonic() - start_s, 2)
    return played


def play_untouched(workspace: Path) -> Path:
    """Trains the run that nobody kills, if it is not there yet; returns its folder in the store."""
    done = workspace / "finished"
    place = FilePlace(workspace)
    if not done.exists():
        workspace.mkdir(parents=True)
        played = Played()
        run = _Run(workspace, place, played)
        try:
            run.start()
            run.finish()
        finally:
            run.end_everything()
        problems = played.problems + audited(workspace, place.folder(), [])
        if problems:
            raise CaseError(f"the untouched run in {workspace} is not sound: {problems}")
        done.write_text("")
    return place.folder()


def audited(workspace: Path, run: Path, seen: list[Acknowledged]) -> list[str]:
    """All problems of a finished run, wherever they show."""
    return [
        *audit_store(run, DATASET_ROWS, ITERATIONS, seen).problems,
        *audit_prefect(workspace / "prefect" / "prefect.db", RUN_ID),
        *audit_mlflow(workspace / "mlflow" / "mlflow.db", run, RUN_ID, ITERATIONS, EVALUATED),
        *audit_metrics_file(workspace / "local" / RUN_ID / "metrics.jsonl"),
    ]


class _Run:
    """The command of a case: started, killed, started again."""

    def __init__(self, workspace: Path, place: Place, played: Played) -> None:
        self.seen: list[Acknowledged] = []
        self.holds: list[str] = []  # points at which the run is still to be held
        self._workspace = workspace
        self._place = place
        self._played = played
        self._process: subprocess.Popen[bytes] | None = None
        self._since_s = 0.0  # when the command was started, or what it outlived happened
        self._ledgers = 0
        self._endings_left = 0
        self._started: set[psutil.Process] = set()
        self._looked_s = 0.0
        self._output = workspace / "output.txt"
        self._dataset = workspace / "train.jsonl"
        lines = (QUICKSTART.parent / "quickstart/train.jsonl").read_text().splitlines(True)
        self._dataset.write_text("".join(lines[:DATASET_ROWS]))

    def start(self) -> None:
        """Starts the command."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PREFECT_", "MLFLOW_", "SLIME_", "AWS_", "RAY_"))
        }
        environment = {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "PREFECT_HOME": str(self._workspace / "profile"),
            "RAY_prestart_worker_first_driver": "0",  # one idle worker per core, else
            "SLIME_HOLD_DIR": str(self._workspace),
            CASE_VARIABLE: str(self._workspace),
            **self._place.environment,
            "SLIME_HOLD_AT": ",".join(self.holds),
        }
        command = [sys.executable, "-m", "flows.cli.main", "train", str(QUICKSTART), *FLAGS]
        command += ["--workspace", str(self._workspace), "--prompt-data", str(self._dataset)]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, *self._place.flags],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._since_s = time.monotonic()

    def meet(self, one: Kill) -> None:
        """Waits for the moment of a kill and kills; a run that has finished is left alone."""
        pids = self._await_moment(one)
        if not pids:
            return
        self._look()
        self._endings_left += 1
        self._played.kills.append({"kill": str(one), "went_on": "", "to_train_s": None})
        kill(pids)
        if one.victim == "everything":  # also what was just about to be started
            while left := marked(self._workspace):
                kill(left)
        self._since_s = time.monotonic()
        if one.hold is not None:
            self.holds.remove(one.hold)
            (self._workspace / one.hold).unlink()
        if one.victim in ENDS_WITH_THE_RUN:
            self._await_end()
            self._await_deaths()
        self.seen.append(acknowledged(self._place.folder()))

    def finish(self) -> None:
        """Resumes until the command ends well; every kill excuses one other end."""
        self._living()
        while self._await_end() != 0:
            self._await_deaths()
            self._living()
        self._await_deaths()
        if self._played.kills and not self._played.kills[-1]["went_on"]:
            self._played.kills[-1]["went_on"] = "in place"
        if "Traceback (most recent call last)" in self._output.read_text(errors="replace"):
            self._played.problems.append("the command printed a traceback")

    def end_everything(self) -> None:
        """Kills what is left of the case."""
        if self._process is not None and self._process.poll() is None:
            kill([*(process.pid for process in below(self._process.pid)), self._process.pid])
            self._process.wait(DEATH_S)
        kill(marked(self._workspace))

    def _await_moment(self, one: Kill) -> list[int]:
        """The processes to kill, once it is time; none where the run finished before."""
        deadline_s = time.monotonic() + WAIT_S
        reached_s: float | None = None
        while time.monotonic() < deadline_s:
            process = self._living()
            if process.poll() == 0:
                return []
            self._look()
            if one.hold is not None:
                is_time = (self._workspace / one.hold).exists()
            elif one.after is None:
                is_time = time.monotonic() - self._since_s >= one.delay_s
            else:
                if reached_s is None and self._ledgers > one.after:
                    reached_s = time.monotonic()
                is_time = reached_s is not None and time.monotonic() - reached_s >= one.delay_s
            if is_time and (pids := victims(process.pid, one.victim)):
                return pids
            time.sleep(LOOK_S)
        raise CaseError(f"the moment for {one} did not come: {self._tail()}")

    def _living(self) -> subprocess.Popen[bytes]:
        """The command; started again where it ended and a kill excuses that."""
        process = self._process
        assert process is not None
        if process.poll() in (None, 0):
            return process
        if not self._endings_left:
            raise CaseError(f"it ended with {process.returncode} by itself: {self._tail()}")
        self._endings_left -= 1
        self.seen.append(acknowledged(self._place.folder()))
        self._played.resumes += 1
        self._played.kills[-1]["went_on"] = "resume"
        self._played.kills[-1]["to_train_s"] = None
        self.start()
        assert self._process is not None
        return self._process

    def _await_end(self) -> int:
        assert self._process is not None
        deadline_s = time.monotonic() + WAIT_S
        while (status := self._process.poll()) is None:
            if time.monotonic() > deadline_s:
                raise CaseError(f"it did not end within {WAIT_S:.0f} s: {self._tail()}")
            self._look()
            time.sleep(LOOK_S)
        self._count_ledgers()
        return status

    def _await_deaths(self) -> None:
        """What a command started must end with it, however it ended."""
        deadline_s = time.monotonic() + DEATH_S
        while left := sorted({*alive(self._started), *marked(self._workspace)}):
            if time.monotonic() > deadline_s:
                self._played.problems.append(
                    f"processes {left} outlived the run by {DEATH_S:.0f} s"
                )
                kill(left)
                return
            time.sleep(LOOK_S)
        self._started.clear()

    def _look(self) -> None:
        """Notices what the command has started and committed by now."""
        self._count_ledgers()
        if self._process is not None and time.monotonic() - self._looked_s > LOOK_AT_PROCESSES_S:
            self._looked_s = time.monotonic()
            self._started.update(below(self._process.pid))

    def _count_ledgers(self) -> None:
        """Notices new ledgers; the first after a kill tells how long the way back took."""
        while self._place.has(f"iterations/{self._ledgers:06d}/ledger.json"):
            self._ledgers += 1
            kills = self._played.kills
            if kills and kills[-1]["to_train_s"] is None:
                kills[-1]["to_train_s"] = round(time.monotonic() - self._since_s, 2)
                kills[-1]["went_on"] = kills[-1]["went_on"] or "in place"

    def _tail(self) -> str:
        return json.dumps(self._output.read_text(errors="replace")[-TAIL_CHARS:])
