"""Services of a temporary workspace in tests, and Prefect's API as its pages use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from slime_core.waits import poll
from tests.e2e.runs import ROOT

COMMAND_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 400.0
SHORT = {"eval_interval": 1000, "skip_eval_before_train": True}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")


@dataclass
class Services:
    """What `slime up` started in `workspace`."""

    workspace: Path

    def slime(self, *arguments: str, status: int = 0) -> str:
        """Runs a command of `slime` on the workspace; returns what it printed."""
        command = [sys.executable, "-m", "flows.cli.main", *arguments]
        return self._run([*command, "--workspace", str(self.workspace)], status)

    def prefect(self, *arguments: str) -> str:
        """Runs a command of `prefect` against the workspace's server."""
        return self._run([sys.executable, "-m", "prefect", *arguments], 0)

    def python(self, code: str) -> str:
        """Runs Python code against the workspace's server."""
        return self._run([sys.executable, "-c", code], 0)

    def _run(self, command: list[str], status: int) -> str:
        environment = dict(os.environ)
        if "flows.cli.main" not in command:
            environment |= {
                "PREFECT_API_URL": f"{self.address('server')}/api",
                "PREFECT_HOME": str(self.workspace / "prefect"),
            }
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMMAND_TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == status, f"{done.returncode}: {done.stdout}\n{self.logs()}"
        return done.stdout

    def record(self, name: str) -> dict[str, Any]:
        return json.loads((self.workspace / "services" / f"{name}.json").read_text())

    def address(self, name: str) -> str:
        return self.record(name)["address"]

    def pid(self, name: str) -> int:
        return self.record(name)["process"]["pid"]

    def logs(self) -> str:
        """The end of every log of the workspace, for a failing test to show."""
        runs = sorted(self.workspace.glob("local/*/logs"), key=lambda path: path.stat().st_mtime)
        found = [*self.workspace.glob("services/*.log"), *(runs[-1].glob("*.log") if runs else ())]
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(found)
        )

    def get(self, path: str) -> Any:
        answer = httpx.get(f"{self.address('server')}/api{path}", timeout=90)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, content: dict[str, Any]) -> Any:
        answer = httpx.post(f"{self.address('server')}/api{path}", json=content, timeout=90)
        answer.raise_for_status()
        return answer.json()

    def start(self, **parameters: Any) -> str:
        """A run of train/quickstart, as the form starts it; returns the flow run's id."""
        deployment = self.get("/deployments/name/train/quickstart")
        content = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        return self.post(f"/deployments/{deployment['id']}/create_flow_run", content)["id"]

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        return self.get(f"/flow_runs/{flow_run_id}")

    def set_state(self, flow_run_id: str, kind: str, name: str | None = None) -> None:
        """What the buttons Cancel and Retry of the page ask for."""
        state = {"type": kind, **({"name": name} if name else {})}
        self.post(f"/flow_runs/{flow_run_id}/set_state", {"state": state})

    def ended(self, flow_run_id: str, limit_s: float = RUN_TIMEOUT_S) -> dict[str, Any]:
        """The flow run, once it is in a state that is an end."""

        def look() -> dict[str, Any] | None:
            run = self.flow_run(flow_run_id)
            return run if run["state"]["type"] in ENDED else None

        return self._await(f"the end of flow run {flow_run_id}", limit_s, look)

    def children(self, flow_run_id: str) -> dict[str, str]:
        """Name -> state of the subflows; of those that a retry repeated, the last one."""
        parent = {"parent_flow_run_id": {"any_": [flow_run_id]}}
        wanted = {"flow_runs": parent, "sort": "START_TIME_ASC"}
        found = self.post("/flow_runs/filter", wanted)
        return {run["name"]: run["state"]["name"] for run in found}

    def tasks(self, flow_run_id: str, count: int) -> set[str]:
        """Names of a flow run's task runs, once there are so many: Prefect makes them from events,
        which may come after the flow's end."""

        def look() -> set[str] | None:
            of_run = {"flow_runs": {"id": {"any_": [flow_run_id]}}}
            found = {one["name"] for one in self.post("/task_runs/filter", of_run)}
            return found if len(found) >= count else None

        return self._await(f"{count} tasks of {flow_run_id}", 60.0, look)

    def trained(self, run_id: str) -> int:
        """Iterations of a training with a ledger."""
        return len(list((self.workspace / "store" / run_id).glob("iterations/*/ledger.json")))

    def training_of(self, flow_run_id: str, iterations: int = 1) -> str:
        """The id of the training behind a flow run, once that many iterations are trained."""

        def look() -> str | None:
            run = self.flow_run(flow_run_id)
            assert run["state"]["type"] not in ENDED, f"{run['state']}\n{self.logs()}"
            run_ids = [tag[4:] for tag in run["tags"] if tag.startswith("run:")]
            return run_ids[0] if run_ids and self.trained(run_ids[0]) >= iterations else None

        return self._await(f"iteration {iterations} of {flow_run_id}", RUN_TIMEOUT_S, look)

    def owners(self) -> set[Path]:
        """What every process has stored that ever had a run."""
        return set((self.workspace / "store").glob("*/epochs/[0-9]*[0-9].json"))

    def owner(self, run_id: str) -> int:
        """Process of the newest owner of a training."""
        epochs = sorted((self.workspace / "store" / run_id / "epochs").glob("[0-9]*.json"))
        return json.loads(epochs[-1].read_text())["body"]["pid"]

    def _await(self, name: str, limit_s: float, look: Any) -> Any:
        try:
            return poll(name, limit_s, look, interval_s=0.25)
        except Exception as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error
