"""Iterations of the training loop without Prefect, with what each of them took and gave."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu.host import used_mib
from slime_core.cluster.device import resolve_device
from slime_core.cluster.engine_choice import resolve_engine
from slime_core.cluster.session import Session
from slime_core.config.tree import RunConfig
from slime_core.refs import Ref
from slime_core.run.context import RunContext
from slime_core.run.identity import choose_run
from slime_core.run.paths import store_url
from slime_core.run.recover import recover
from slime_core.stages.evaluate import due_evaluation, evaluate
from slime_core.stages.generate import generate
from slime_core.stages.pack import pack
from slime_core.stages.reward import reward
from slime_core.stages.sample import sample
from slime_core.stages.sync import sync
from slime_core.stages.train import train
from slime_core.store import layout
from slime_core.store.backend import open_backend

LOG_TAIL_CHARACTERS = 3000


def run_loop(config: RunConfig) -> dict[str, Any]:
    """Runs config.run.num_rollout iterations of a fresh run. Call it in the main thread.

    Returns:
        ready_s, iterations [{k, seconds, metrics, wall_s, used_mib}], evaluations {version:
        metrics}, engine, device, total_s; and "error" with a trace and the ends of all logs where
        the loop failed.
    """
    result: dict[str, Any] = {"iterations": [], "evaluations": {}, "error": None}
    result["device"] = resolve_device(config)
    result["engine"] = resolve_engine(config, result["device"])
    started = time.monotonic()
    store = open_backend(store_url(config.run.workspace, config.store.store_url))
    session = Session.start(config, choose_run(store, config, "never").run_id)
    try:
        asyncio.run(_drive(session, result, started))
    except Exception:
        result["error"] = traceback.format_exc() + _log_ends(session.paths.logs)
        print(result["error"], flush=True)
    result["total_s"] = time.monotonic() - started
    return result


async def _drive(session: Session, result: dict[str, Any], started: float) -> None:
    reason = "failed"
    try:
        ctx = await session.ready()
        result["ready_s"] = time.monotonic() - started
        await recover(ctx)
        await _evaluate(ctx, -1, result)
        for k in range(ctx.config.run.num_rollout):
            result["iterations"].append(await _iteration(ctx, k))
            await _evaluate(ctx, k, result)
        reason = "finished"
    finally:
        await session.close(reason)


async def _iteration(ctx: RunContext, k: int) -> dict[str, Any]:
    began = time.monotonic()
    ref: Ref = await sample(ctx, k)
    for stage in (generate, reward, pack, train, sync):
        ref = await stage(ctx, ref)
    row = {
        "k": k,
        "wall_s": time.monotonic() - began,
        "seconds": ctx.clock.of(k),
        "metrics": ctx.outbox.iteration(k),
        "used_mib": used_mib(),
    }
    metrics = row["metrics"]
    print(
        f"iteration {k}: {row['wall_s']:.2f} s, reward {metrics['rollout/raw_reward']:.3f}, "
        f"log-prob difference {metrics['train/train_rollout_logprob_abs_diff']:.2e}, "
        f"canary {metrics['sync/canary_abs_diff']:.2e}",
        flush=True,
    )
    return row


async def _evaluate(ctx: RunContext, k: int, result: dict[str, Any]) -> None:
    if not due_evaluation(ctx, k):
        return
    await evaluate(ctx, k, k + 1)
    prefix = f"{layout.EVALS}{ctx.state.lineage}-{k + 1}/"
    found = ctx.outbox.evaluations(prefix)
    result["evaluations"][k + 1] = found
    rewards = {name: value for name, value in found.items() if name.endswith("/reward")}
    print(f"evaluation {k + 1}: {rewards}", flush=True)


def medians(result: dict[str, Any], name: str, warm_up: int) -> dict[str, float]:
    """Median seconds of each stage behind the first iterations; `name` is seconds or metrics."""
    rows = [row[name] for row in result["iterations"][warm_up:]]
    keys = sorted({key for row in rows for key in row})
    return {key: statistics.median(row[key] for row in rows if key in row) for key in keys}


def extremes(result: dict[str, Any], metric: str) -> tuple[float, float]:
    """Median and largest value of a metric over all iterations."""
    values = [row["metrics"][metric] for row in result["iterations"]]
    return statistics.median(values), max(values)


def _log_ends(folder: Path) -> str:
    ends = []
    for log in sorted(folder.glob("*.log")):
        text = log.read_text(errors="replace")
        ends.append(f"\n--- the end of {log.name}\n{text[-LOG_TAIL_CHARACTERS:]}")
    return "".join(ends)


def clear(workspace: Path) -> None:
    """Removes a workspace that a benchmark made."""
    shutil.rmtree(workspace, ignore_errors=True)
