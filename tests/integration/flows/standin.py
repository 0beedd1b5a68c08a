"""A run whose stages are stand-ins: they write the documents that the flow reads, and wait on cue.

As a script it trains in a process of its own, so that a test can kill it:
`python -m tests.integration.flows.standin FOLDER RUN_ID ITERATIONS STAGE K` writes FOLDER/held and
holds before stage STAGE of iteration K.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flows.launch import LAUNCH, Launch
from slime_core.config.tree import RunConfig
from slime_core.refs import Ref
from slime_core.run.identity import RunChoice
from slime_core.store import layout
from slime_core.store.backend import open_backend
from slime_core.tracking.outbox import Outbox
from tasks._run import Stages
from tests.unit.tracking.documents import write_evaluation, write_iteration


def config(num_rollout: int, workspace: Path, **tracking: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"num_rollout": num_rollout, "workspace": str(workspace)},
            "tracking": {"use_mlflow": False, **tracking},
            "data": {"prompt_data": "p.jsonl", "label_key": "label"},
            "rollout": {
                "hf_checkpoint": "m",
                "rollout_batch_size": 4,
                "rollout_max_response_len": 8,
            },
            "rewards": {"rm_type": "exact_match"},
            "fault_tolerance": {"stage_timeout_s": 60},
        }
    )


@dataclass
class Recovery:
    next_iteration: int
    resumed: bool
    table: list[tuple[str, str]] = field(default_factory=lambda: [("replayed", "0 iterations")])


@dataclass
class StandIn:
    """One training in `folder`.

    Attributes:
        calls: (stage, iteration) in order.
        hooks: what a stage does first, by (stage, iteration).
        evaluate_at: iterations after which an evaluation is due (-1: before the first).
        sealed: (kind, iteration) of what counts as found in the store.
        workspace: default `folder`.
        changes: fields of `tracking`.
        closed: why the session was closed.
    """

    folder: Path
    run_id: str
    num_rollout: int = 3
    calls: list[tuple[str, int]] = field(default_factory=list)
    hooks: dict[tuple[str, int], Callable[[], Awaitable[None]]] = field(default_factory=dict)
    evaluate_at: tuple[int, ...] = (-1, 1)
    sealed: set[tuple[str, int]] = field(default_factory=set)
    workspace: Path | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    closed: str = ""

    def __post_init__(self) -> None:
        self.config = config(self.num_rollout, self.workspace or self.folder, **self.changes)
        self.state = SimpleNamespace(lineage="a", drifts=0)
        self.engines = SimpleNamespace(restarted=0)
        self.store = open_backend(str(self.folder / "store"))

    def trained(self) -> list[int]:
        return [k for name, k in self.calls if name == "train"]

    def ledgers(self) -> set[int]:
        found = {layout.parse_iteration(entry.key) for entry in self.store.list(layout.ITERATIONS)}
        return {item[0] for item in found if item and item[1] == "ledger"}

    async def _enter(self, name: str, k: int) -> None:
        self.calls.append((name, k))
        if hook := self.hooks.get((name, k)):
            await hook()

    def _ref(self, kind: str, k: int) -> Ref:
        return Ref(f"{kind}/{k:06d}", kind, k, 32, 160, "d", from_store=(kind, k) in self.sealed)

    def _follower(self, name: str, kind: str) -> Callable[..., Awaitable[Ref]]:
        async def stage(_: object, ref: Ref) -> Ref:
            await self._enter(name, ref.iteration)
            if name == "train" and ref.iteration not in self.ledgers():
                write_iteration(self.store, ref.iteration)
            return self._ref(kind, ref.iteration)

        return stage

    def stages(self) -> Stages:
        async def sample(_: object, k: int) -> Ref:
            await self._enter("sample", k)
            return self._ref("draws", k)

        async def evaluate(_: object, k: int, version: int) -> Ref:
            await self._enter("evaluate", k)
            write_evaluation(self.store, version)
            return self._ref("eval", k)

        async def recover(_: object) -> Recovery:
            done = self.ledgers()
            return Recovery(max(done, default=-1) + 1, bool(done))

        return Stages(
            recover=recover,
            sample=sample,
            generate=self._follower("generate", "seal"),
            reward=self._follower("reward", "scores"),
            pack=self._follower("pack", "batch"),
            train=self._follower("train", "ledger"),
            sync=self._follower("sync", "sync"),
            evaluate=evaluate,
            due_evaluation=lambda _, k: k in self.evaluate_at,
        )

    async def ready(self) -> SimpleNamespace:
        self.outbox = Outbox(self.folder, self.store)
        return SimpleNamespace(
            config=self.config,
            run_id=self.run_id,
            outbox=self.outbox,
            state=self.state,
            engines=self.engines,
        )

    async def close(self, reason: str) -> None:
        self.closed = reason
        self.outbox.close("FINISHED", 5)

    def launch(self) -> Launch:
        choice = RunChoice(self.run_id, False, f"starting run {self.run_id}")
        return Launch(self.config, choice, self, stages=self.stages())

    def train(self) -> Launch:
        """Runs the parent flow to its end."""
        from flows.train import train

        launch = self.launch()
        token = LAUNCH.set(launch)
        try:
            asyncio.run(train(launch.config))
        finally:
            LAUNCH.reset(token)
        return launch


def main() -> None:
    folder, run_id, iterations, stage, k = sys.argv[1:]

    async def hold() -> None:
        Path(folder, "held").touch()
        await asyncio.sleep(600)

    hooks = {(stage, int(k)): hold}
    StandIn(Path(folder), run_id, int(iterations), hooks=hooks).train()


if __name__ == "__main__":
    main()
