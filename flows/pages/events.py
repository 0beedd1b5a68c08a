"""Events of a run in Prefect, for automations.

Each has the resource `slime.run.<run id>` and the flow run as a related resource with the role
`flow-run`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.events import emit_event

DONE = "slime.iteration.done"
STALLED = "slime.run.stalled"
DRIFT = "slime.alert.drift"
SKIPPED = "slime.alert.skipped-step"
MISSED = "slime.alert.missed-evaluation"
ENGINE = "slime.alert.engine-restarted"
TOLD = ("rollout/raw_reward", "train/loss", "train/grad_norm", "perf/step_time")


@dataclass(frozen=True)
class Vitals:
    """Counters of a run whose growth is worth an alert.

    Attributes:
        drifts: replays that gave other weights than the ledger names.
        engine_restarts: of all engines since the process began.
    """

    drifts: int = 0
    engine_restarts: int = 0


@dataclass(frozen=True)
class EventSource:
    """Sends events in the name of a run; Prefect's own thread delivers them."""

    run_id: str
    flow_run_id: UUID

    def emit(self, event: str, payload: dict[str, Any]) -> None:
        """Hands over one event."""
        flow_run = {
            "prefect.resource.id": f"prefect.flow-run.{self.flow_run_id}",
            "prefect.resource.role": "flow-run",
        }
        emit_event(event, self.resource, related=[flow_run], payload=payload)

    @property
    def resource(self) -> dict[str, str]:
        return {
            "prefect.resource.id": resource_id(self.run_id),
            "prefect.resource.name": self.run_id,
        }


def resource_id(run_id: str) -> str:
    """What automations match on."""
    return f"slime.run.{run_id}"


def done(k: int, metrics: dict[str, float]) -> dict[str, Any]:
    """What the event of an iteration says."""
    return {"iteration": k, **{name: metrics[name] for name in TOLD if name in metrics}}


def alerts(
    k: int, metrics: dict[str, float], before: Vitals, now: Vitals
) -> list[tuple[str, dict[str, Any]]]:
    """The alerts of an iteration: event and payload.

    Args:
        metrics: of the iteration, evaluations included.
        before, now: counters when it began and ended.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    if now.drifts > before.drifts:
        found.append((DRIFT, {"iteration": k, "drifts": now.drifts}))
    if now.engine_restarts > before.engine_restarts:
        restarts = now.engine_restarts - before.engine_restarts
        found.append((ENGINE, {"iteration": k, "restarts": restarts}))
    if skipped := metrics.get("train/skipped_steps", 0.0):
        found.append((SKIPPED, {"iteration": k, "steps": int(skipped)}))
    for name, value in metrics.items():
        if name.startswith("eval/") and name.endswith("/missed") and value:
            dataset = name.removeprefix("eval/").removesuffix("/missed")
            found.append((MISSED, {"iteration": k, "dataset": dataset}))
    return found
