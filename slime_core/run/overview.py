"""What a store holds, a line for each run."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from slime_core.errors import ConfigError, SlimeError, UnavailableError
from slime_core.near import nearest
from slime_core.run.epoch import newest_epoch, owner_of
from slime_core.run.identity import begun, iterations_done, list_runs, planned_iterations
from slime_core.store import layout
from slime_core.store.backend import Backend, open_backend
from slime_core.store.batch import read_batch

CLOCK_SKEW_S = 5.0
"""How far this machine's clock and that of the store may lie apart."""


@dataclass(frozen=True)
class RunOverview:
    """One run at a glance.

    Attributes:
        state: `running` (its owner is alive, or showed it lately), `not started` (no start of it
            came to a draw), `finished`, `stopped` (its owner came to a clean end before that),
            `killed` (its owner is gone or silent), `new` (it never had one), `damaged`.
        iterations: that are trained.
        planned: iterations that it was to have when it last trained, None where that is not known.
        reward: mean raw reward of the newest batch, None before there is one.
        age_s: since anything was last written. Clocks may differ, so it is about right.
        where: URL.
        note: what is damaged, or where the run was forked from.
    """

    run_id: str
    state: str
    iterations: int
    planned: int | None
    reward: float | None
    age_s: float
    where: str
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def overview(root: Backend, url: str, patience_s: float | None = None) -> list[RunOverview]:
    """All runs below a store's root, the oldest first. Nothing is written, so the ages are those
    of this machine's clock.

    Args:
        url: of the root.
        patience_s: how long a store that is away is asked again, as in `open_backend`.

    Raises:
        UnavailableError: the store went away.
    """
    return [_look(root, url, run.body, time.time(), patience_s) for run in list_runs(root)]


RUNS = pa.schema(
    [
        ("run_id", pa.string()),
        ("state", pa.string()),
        ("iterations", pa.int64()),
        ("planned", pa.int64()),
        ("reward", pa.float64()),
        ("age_s", pa.float64()),
        ("url", pa.string()),
        ("note", pa.string()),
    ]
)


def runs_table(root: Backend, url: str) -> pa.Table:
    """The table `runs` of queries: what `overview` says, with `url` for `where`, which SQL needs
    for itself."""
    rows = [one.to_dict() for one in overview(root, url)]
    return pa.Table.from_pylist([{**row, "url": row["where"]} for row in rows], schema=RUNS)


def state_of(root: Backend, url: str, run_id: str) -> str:
    """How a run stands, as `RunOverview.state` says.

    Args:
        url: of the root.
    """
    [run] = [one for one in list_runs(root) if one.body["run_id"] == run_id]
    return _look(root, url, run.body, time.time()).state


def find_run(root: Backend, wanted: str) -> str:
    """The id of a run from its id, a beginning that fits one run only, or `last`.

    Raises:
        ConfigError: none or several fit; names them.
    """
    ids = [str(run.body["run_id"]) for run in list_runs(root)]
    if wanted in ids:
        return wanted
    if wanted == "last" and ids:
        return ids[-1]
    fitting = [run_id for run_id in ids if run_id.startswith(wanted)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ConfigError(f"run {wanted}: this may be {', '.join(fitting)}; type more of it")
    close = nearest(wanted, ids)
    hint = f"did you mean {close}?" if close else "see `slime runs`" if ids else "it has no runs"
    raise ConfigError(f"run {wanted} is not in {root.url}: {hint}")


def _look(
    root: Backend, url: str, body: dict[str, Any], now_s: float, patience_s: float | None = None
) -> RunOverview:
    run_id = body["run_id"]
    where = f"{url.rstrip('/')}/{run_id}"
    run = open_backend(where, read_only=True, patience_s=patience_s)
    entries = run.list(layout.ITERATIONS) + run.list(layout.EPOCHS) + run.list(layout.DRAWS)
    age_s = max(0.0, now_s - max((entry.modified_s for entry in entries), default=now_s))
    note = f"fork of {body['fork']['run_id']}@{body['fork']['at']}" if body.get("fork") else ""
    try:
        done = iterations_done(root, run_id)
        planned = planned_iterations(root, run_id, done)
        state = _state(run, now_s, planned is not None and done >= planned)
        if state != "running" and not begun(root, run_id):
            state = "not started"
        return RunOverview(run_id, state, done, planned, _reward(run), age_s, where, note)
    except UnavailableError:
        raise
    except SlimeError as error:
        return RunOverview(run_id, "damaged", 0, None, None, age_s, where, str(error))


def _state(run: Backend, now_s: float, all_trained: bool) -> str:
    newest = newest_epoch(run)
    if newest is None:
        return "new"
    if newest.ended:
        return "finished" if all_trained else "stopped"
    owner, ttl_s = owner_of(run, newest.epoch)
    gone = owner.is_gone()
    if gone is not None:
        return "killed" if gone else "running"
    silent_s = now_s - newest.last_sign_s - run.clock_resolution_s - CLOCK_SKEW_S
    return "running" if silent_s < ttl_s else "killed"


def _reward(run: Backend) -> float | None:
    found = (layout.parse_iteration(entry.key) for entry in run.list(layout.ITERATIONS))
    batches = [item[0] for item in found if item is not None and item[1] == "batch"]
    batch = read_batch(run, max(batches)) if batches else None
    if batch is None or not batch.content.rows:
        return None
    return sum(batch.content.raw_rewards) / batch.content.rows
