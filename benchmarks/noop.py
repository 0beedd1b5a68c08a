"""What Prefect costs in a long run: `python -m benchmarks.noop --iterations 1000`.

Trains nothing: the stages write the small documents that the flow reads, and a Prefect server of
our own shows it. Prints the time of an iteration at the beginning and at the end, the memory of the
flow's process, and the size of Prefect's database, which must not grow with the iterations.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil

from flows.server import OwnServer, client_environment
from slime_core.store import layout
from slime_core.store.backend import open_backend
from slime_core.store.documents import put_document
from slime_core.tracking.outbox import Outbox

RUN_ID = "noop"
START_TIMEOUT_S = 120.0
SEGMENT = 100
WARM_UP = 5
NO_ROWS = {
    **{name: [] for name in ("groups", "rewards", "raw_rewards", "rollout_ids", "denominators")},
    **{"steps": [], "unused": [], "seals": {}, "overlays": {}, "tokens": 0},
    "metrics": {"raw_reward": 0.5},
}
STAGES = ("generate", "reward", "pack", "train", "sync")


@dataclass
class Noop:
    """A session whose stages do nothing."""

    config: object
    folder: Path
    ended_s: list[float] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    database_bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = open_backend(str(self.folder / "store" / RUN_ID))
        self.outbox = Outbox(self.folder / "local" / RUN_ID, self.store)

    async def ready(self) -> SimpleNamespace:
        return SimpleNamespace(
            config=self.config,
            run_id=RUN_ID,
            outbox=self.outbox,
            state=SimpleNamespace(lineage="l0", drifts=0),
            engines=SimpleNamespace(restarted=0),
        )

    async def close(self, reason: str) -> list[str]:
        return self.outbox.close("FINISHED", START_TIMEOUT_S)

    def note(self) -> None:
        """Measures at the end of an iteration."""
        self.ended_s.append(time.monotonic())
        self.rss_bytes.append(psutil.Process().memory_info().rss)
        home = self.folder / "prefect"
        self.database_bytes.append(sum(f.stat().st_size for f in home.glob("prefect.db*")))


def stages_of(noop: Noop):
    """Stages that write what the next one reads, and nothing else."""
    from slime_core.refs import Ref
    from tasks._run import Stages

    def ref(kind: str, k: int) -> Ref:
        return Ref(f"{kind}/{k:06d}", kind, k, 1, 1, "d")

    async def recover(_: object) -> SimpleNamespace:
        return SimpleNamespace(next_iteration=0, resumed=False, table=[])

    async def sample(_: object, k: int) -> Ref:
        return ref("draws", k)

    def follower(name: str):
        async def stage(_: object, before: Ref) -> Ref:
            k = before.iteration
            if name == "pack":
                put_document(noop.store, layout.batch(k), {"iteration": k, **NO_ROWS}, {})
            if name == "train":
                steps = [{"loss": 0.25, "grad_norm": 1.0, "lr": 1e-3, "skipped": False}]
                put_document(noop.store, layout.ledger(k), {"result": {"steps": steps}}, {})
            return ref(name, k)

        return stage

    followers = {name: follower(name) for name in STAGES}
    return Stages(
        recover=recover,
        sample=sample,
        **followers,
        evaluate=followers["sync"],
        due_evaluation=lambda _, k: False,
    )


def train(iterations: int, workspace: Path, server: OwnServer) -> Noop:
    """One run through the server; returns what was measured."""
    os.environ.update(client_environment(server.api_url, server.home))
    from flows.launch import LAUNCH, Launch, LogReport
    from flows.train import train as flow
    from slime_core.config.tree import RunConfig
    from slime_core.run.identity import RunChoice

    config = RunConfig.model_validate(
        {
            "run": {"num_rollout": iterations, "workspace": str(workspace)},
            "data": {"prompt_data": "none.jsonl"},
            "rollout": {
                "hf_checkpoint": "none",
                "rollout_batch_size": 1,
                "rollout_max_response_len": 1,
            },
            "rewards": {"rm_type": "random"},
            "tracking": {"use_mlflow": False},
        }
    )
    noop = Noop(config, workspace)

    class Report(LogReport):
        def start(self) -> None:
            noop.note()

        def iteration(self, k: int, metrics: dict[str, float]) -> None:
            noop.note()
            if (k + 1) % SEGMENT == 0:
                passed_s = noop.ended_s[-1] - noop.ended_s[0]
                print(f"{k + 1} iterations after {passed_s:.0f} s", flush=True)

    choice = RunChoice(RUN_ID, False, "")
    launch = Launch(config, choice, noop, report=Report(), stages=stages_of(noop))  # type: ignore[arg-type]
    LAUNCH.set(launch)
    asyncio.run(flow(config))
    return noop


def table(noop: Noop, keep_from: int) -> list[str]:
    """What is printed: a line for each hundred iterations, then the verdicts."""
    took = [b - a for a, b in zip(noop.ended_s, noop.ended_s[1:], strict=False)]
    lines = ["iterations     median s   p90 s   max s   memory MB   database MB"]
    for start in range(0, len(took), SEGMENT):
        part = sorted(took[max(start, WARM_UP) : start + SEGMENT])
        if not part:
            continue
        last = min(start + SEGMENT, len(took))
        lines.append(
            f"{start:>5} - {last - 1:<5}  {statistics.median(part):9.3f} "
            f"{part[int(0.9 * len(part))]:7.3f} {part[-1]:7.3f} "
            f"{noop.rss_bytes[last] / 1e6:10.1f} {noop.database_bytes[last] / 1e6:13.1f}"
        )
    rest = sorted(took[WARM_UP:])
    median, p90 = statistics.median(rest), rest[int(0.9 * len(rest))]
    lines.append(f"all: median {median:.3f} s, p90 {p90:.3f} s, of {len(rest)}")
    tail = noop.rss_bytes[keep_from:]
    if len(tail) > 1:
        slope = statistics.linear_regression(range(len(tail)), tail).slope
        lines.append(f"memory from iteration {keep_from} on: {slope / 1e3:+.2f} kB an iteration")
    per = noop.database_bytes[-1] / len(took) / 1e3
    lines.append(f"database: {per:.1f} kB an iteration")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--iterations", type=int, default=1000)
    options = parser.parse_args()
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder:
        server = OwnServer.start(Path(folder))
        try:
            server.wait_healthy(START_TIMEOUT_S)
            noop = train(options.iterations, Path(folder), server)
        finally:
            server.stop()
        print("\n".join(table(noop, min(options.iterations // 2, 300))))
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
