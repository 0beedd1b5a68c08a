"""The evaluation of stored weights or of a model: a flow with a task for each dataset."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from blocks.resolve import resolve
from flows.cli.replay import build_rank
from flows.launch import trackers_of
from flows.pages.artifacts import key_of
from flows.parameters import as_text, as_tree
from flows.prefect_api import API_ERRORS
from flows.services.environment import WORKSPACE
from slime_core.check.evaluation import require_evaluation
from slime_core.config.block_names import blocks_in
from slime_core.errors import ConfigError
from slime_core.evaluation.standalone import Result, StandaloneEvaluation
from slime_core.evaluation.target import Place, Target, find_target
from slime_core.tracking.outbox import Outbox
from slime_core.waits import poll
from tasks._options import flow_options
from tasks.evaluate_model import EVALUATION, engines, evaluate_dataset, weights

log = logging.getLogger(__name__)
TRACKER_TIMEOUT_S = 30.0
ALONE_TIMEOUT_S = 4 * TRACKER_TIMEOUT_S
EVAL_TAG = "evaluation:"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Steps:
    """How the steps of an evaluation are called: directly, or as tasks."""

    weights: Callable[[StandaloneEvaluation], Awaitable[None]]
    engines: Callable[[StandaloneEvaluation], Awaitable[None]]
    run: Callable[[StandaloneEvaluation, str], Awaitable[Result]]


PLAIN = Steps(lambda one: one.weights(), lambda one: one.engines(), lambda one, n: one.run(n))
AS_TASKS = Steps(lambda _: weights(), lambda _: engines(), lambda _, n: evaluate_dataset(n))


@dataclass
class Prepared:
    """A target that a command has found already, and where it wants the results."""

    target: Target
    say: Say
    results: list[Result]
    notes: list[str]


PREPARED: ContextVar[Prepared | None] = ContextVar("slime_prepared_evaluation", default=None)


@flow(**flow_options("evaluate", numbered=False))
async def evaluate(
    target: str = "last",
    version: str | None = None,
    config: dict[str, Any] | None = None,
    overrides: dict[str, Any] | None = None,
) -> None:
    """Evaluate stored weights of a run, or a Hugging Face model, on held-out prompts.

    Args:
        target: a run (id, its beginning, or `last`), the folder of one of its checkpoints, or the
            folder of a Hugging Face model.
        version: iterations contained in the run's weights; none takes the newest.
        config: a configuration with the settings of the evaluation; none takes the run's own.
        overrides: single values over it by field name, such as {"eval_temperature": 0.0}.
    """
    prepared = PREPARED.get()
    if prepared is None:
        given = as_tree("overrides", overrides or {})
        workspace = given.pop("workspace", os.environ.get(WORKSPACE, "runs"))
        place = Place(workspace, given.pop("store_url", None))
        version = None if version is None else as_text("version", version)
        config = as_tree("config", config) if config else None
        target = as_text("target", target)
        prepared = await prepare(target, version, config, given, place, log.info)
    await _name(prepared.target)
    await evaluated(prepared, AS_TASKS)
    await _show(prepared)


async def prepare(
    given: str,
    version: str | None,
    config: str | dict[str, Any] | None,
    overrides: dict[str, Any],
    place: Place,
    say: Say,
) -> Prepared:
    """Finds the target and looks at everything it needs; nothing is started.

    Raises:
        ConfigError: what is wrong with it, in a sentence each.
    """
    target = find_target(given, version, config, overrides, place)
    if blocks_in(target.config) and "PREFECT_API_URL" not in os.environ:
        raise ConfigError(
            "block:NAME stands in Prefect: start `slime up` (and leave --no-prefect out)"
        )
    resolved = await resolve(target.config)
    os.environ.update(resolved.environment)
    require_evaluation(resolved.config)
    return Prepared(replace(target, config=resolved.config), say, [], [])


async def evaluated(prepared: Prepared, steps: Steps) -> None:
    """Evaluates what the store lacks, and tells MLflow.

    Raises:
        SlimeError: what stopped it; results that were stored before stay.
    """
    target, say = prepared.target, prepared.say
    async with StandaloneEvaluation(target, build_rank) as evaluation:
        EVALUATION.set(evaluation)
        stored = {name: evaluation.stored(name) for name in evaluation.datasets}
        missing = [name for name, result in stored.items() if result is None]
        if missing:
            say(f"preparing the weights {target.version}")
            await steps.weights(evaluation)
            say("starting the engines")
            await steps.engines(evaluation)
        for name, result in stored.items():
            if result is None:
                say(f"evaluating {name}")
                result = await steps.run(evaluation, name)
            prepared.results.append(result)
    prepared.notes += delivered(target, prepared.results)


def delivered(target: Target, results: list[Result]) -> list[str]:
    """Brings results to the trackers that lack them. The lines are kept in a file of their own,
    since the run itself may be writing to its metrics.jsonl; it finds these in the store.

    Returns:
        Sentences about what did not reach a tracker.
    """
    trackers = trackers_of(target.config, target.owner, guest=target.model is None)
    folder = target.paths.local / "evaluations"
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder / "lock"):
        gpus = target.config.cluster.rollout_num_gpus
        outbox = Outbox(folder, target.backend, gpus, trackers)
        for result in results:
            outbox.evaluation(result.key)
        return outbox.close("FINISHED", TRACKER_TIMEOUT_S)


def rows_of(target: Target, results: list[Result]) -> list[dict[str, Any]]:
    """A row for each dataset, all with the same columns."""
    names = dict.fromkeys(name for result in results for name in result.metrics)
    return [
        {"dataset": one.dataset, **{name: one.metrics.get(name) for name in names}}
        for one in results
    ]


def table_text(target: Target, results: list[Result]) -> str:
    """Markdown of the results."""
    rows = rows_of(target, results)
    names = list(rows[0])
    lines = [f"# {target.owner}, weights {target.version}", ""]
    lines += [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows:
        cells = ["-" if v is None else f"{v:.6g}" if isinstance(v, float) else v
                 for v in row.values()]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- `{target.backend.url}/{one.key}`" for one in results)]
    return "\n".join(lines)


@contextmanager
def _alone(path: Path):
    """Keeps other evaluations of this run on this machine from sending at the same time.

    Raises:
        DeadlineError: another one did not end its sending.
    """
    name = f"another evaluation to tell the trackers ({path})"
    with path.open("w") as file:
        poll(name, ALONE_TIMEOUT_S, lambda: _locked(file))
        yield


def _locked(file: IO[str]) -> bool | None:
    """True once the lock is ours; another handle of the file may have it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return True


async def _name(target: Target) -> None:
    """Names the flow's run after what it evaluates."""
    try:
        async with get_client() as client:
            name = f"evaluate {target.owner} {target.version}"
            tags = {*flow_run.tags, f"{EVAL_TAG}{target.owner}"}
            await client.update_flow_run(flow_run.id, name=name, tags=tags)  # type: ignore[arg-type]
    except API_ERRORS as error:
        log.warning("Prefect failed at naming the flow run: %s", error)


async def _show(prepared: Prepared) -> None:
    target = prepared.target
    try:
        await acreate_markdown_artifact(
            table_text(target, prepared.results),
            key=key_of("evaluation", target.owner),
            description=f"{target.owner}, weights {target.version}",
        )
    except API_ERRORS as error:
        log.warning("Prefect did not take the results: %s", error)
