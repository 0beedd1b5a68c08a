"""`slime audit RUN@K --layout tp2`: train a stored iteration in another layout, and compare."""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

from flows.cli.replay import build_rank
from flows.cli.stored import open_run, parser, show
from slime_core.cluster.device import resolve_device
from slime_core.cluster.rank_processes import RankProcesses
from slime_core.cluster.trainer_settings import trainer_settings
from slime_core.config.flags import parse
from slime_core.config.tree import RunConfig
from slime_core.engines.launcher import free_port
from slime_core.errors import ConfigError
from slime_core.run.departures import MetricRow, Tolerance, compare_steps, first_departure
from slime_core.run.identity import recorded_config
from slime_core.run.layouts import Layout, parse_layout
from slime_core.run.replay import Rank, Replay
from slime_core.store.cache import NodeCache
from slime_core.store.ledger import Ledger

DTYPES = ("float32", "bfloat16")


def main(arguments: list[str]) -> int:
    """Prints every metric as it was stored and as it is now; 1 if one departs."""
    options = parse(_parser(), arguments)
    options.run, k = _run_and_iteration(options.run)
    layout = parse_layout(options.layout)
    run_id, cache = open_run(options)
    with tempfile.TemporaryDirectory(prefix="slime-audit-") as scratch:
        steps, now, dtype = _again(cache, k, layout, options.dtype, Path(scratch))
    tolerance = Tolerance.of(dtype, options.tolerance)
    rows = compare_steps(steps, now, tolerance)
    departure = first_departure(rows)
    show([row.to_dict() for row in rows], options.json)
    if not options.json:
        where = f"iteration {k} of {run_id} as {options.layout} in {dtype}"
        print(f"{where}: {_said(departure, tolerance)}")
    return 0 if departure is None else 1


def _parser() -> argparse.ArgumentParser:
    made = parser("audit", __doc__)
    made.epilog = "The run is only read. Several ranks are processes on the CPU of this machine."
    made.usage = "slime audit RUN@K [--layout tp2|pp2|dp2|tp2-sp|...] [--dtype float32|bfloat16]"
    made.add_argument("--layout", default="tp1", help="sizes, such as tp2, tp2-sp, pp2dp2")
    made.add_argument("--dtype", choices=DTYPES, help="precision; by default the run's")
    made.add_argument(
        "--tolerance", type=_tolerance, metavar="T",
        help="relative difference that is allowed; by default 1e-5, in bfloat16 0.02",
    )  # fmt: skip
    return made


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"--tolerance must be a number from 0, not {text!r}")
    return value


def _run_and_iteration(text: str) -> tuple[str, int]:
    run, at, number = text.rpartition("@")
    if not (run and at and number.isascii() and number.isdigit()):
        raise ConfigError(f"{text}: write RUN@K, such as last@12, with the iteration behind the @")
    return run, int(number)


def _again(
    cache: NodeCache, k: int, layout: Layout, dtype: str | None, scratch: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """(stored steps, steps of now, precision) of an iteration."""
    alone = Layout().overrides
    wanted = dict(layout.overrides)
    if dtype is not None:
        wanted["megatron"] = {**layout.megatron, "bf16": dtype == "bfloat16"}

    def as_it_was(ledger: Ledger) -> RunConfig:
        return recorded_config(cache.backend, ledger.numeric_digest, alone)

    def changed(ledger: Ledger) -> RunConfig:
        return recorded_config(cache.backend, ledger.numeric_digest, wanted)

    replay = Replay(cache, _build, as_it_was, scratch)
    if k >= len(replay.chain):
        has = f"it has 0 to {len(replay.chain) - 1}" if replay.chain else "it has trained none"
        raise ConfigError(f"iteration {k} is not in the run: {has}")
    config = changed(replay.chain[k])
    precision = trainer_settings(config, resolve_device(config), 0, 1).dtype
    ((_, result),) = replay.results(range(k, k + 1), changed)
    return replay.chain[k].result["steps"], result["steps"], precision


def _build(config: RunConfig) -> Rank:
    ranks = config.cluster.actor_num_gpus_per_node
    if ranks == 1:
        return build_rank(config)
    device, port = resolve_device(config), free_port()
    settings = [trainer_settings(config, device, rank, port) for rank in range(ranks)]
    return RankProcesses(settings, config.fault_tolerance.stage_timeout_s)


def _said(departure: MetricRow | None, tolerance: Tolerance) -> str:
    allowed = f"{tolerance.relative:g} relative and {tolerance.absolute:g} absolute"
    if departure is None:
        return f"every metric is as it was stored, within {allowed}"
    now = "missing" if departure.now is None else f"{departure.now:g}"
    return (
        f"{departure.metric} of step {departure.step} departs first: {departure.stored:g} then, "
        f"{now} now, {departure.allowed:.3g} are allowed ({allowed})"
    )
