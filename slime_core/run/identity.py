"""Which run a start means: a new one, or the last unfinished one of the same identity."""

from __future__ import annotations

import logging
import re
import secrets
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from slime_core.config.fields import identity_digest, numeric_digest, values
from slime_core.config.loading import apply_overrides, build_config
from slime_core.config.parallel import without_layout
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError, DigestError, MissingError
from slime_core.evaluation.obligations import owed
from slime_core.evaluation.resolve import eval_datasets, eval_schedule
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.documents import Document, put_document, read_document
from slime_core.words import counted

log = logging.getLogger(__name__)
FORMAT_VERSION = 1
INDEX = "runs/"

ONE_RANK = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 1}
"""What trains or evaluates in one process, whatever the layout of the run."""


@dataclass(frozen=True)
class RunChoice:
    """A chosen run.

    Attributes:
        resumed: it existed before, though it may not have come to its first draw.
        finished: nothing is left to do in it.
        sentence: what a person is told.
    """

    run_id: str
    resumed: bool
    sentence: str
    finished: bool = False


def choose_run(store: Backend, config: RunConfig, resume: str = "auto") -> RunChoice:
    """Decides which run this start means. Writes nothing.

    Args:
        store: root of all runs.
        resume: "auto" takes the last unfinished run of the same identity, "never" a new one, a
            run id exactly that one (it is created if it does not exist).

    Raises:
        ConfigError: the named run has another identity.
    """
    if resume == "never":
        return _new(config)
    if resume != "auto":
        return _named(store, config, resume)
    wanted = identity_digest(config)
    same = [run for run in list_runs(store) if run.body["identity_digest"] == wanted]
    for run in reversed(same):
        run_id = run.body["run_id"]
        done = iterations_done(store, run_id)
        owed = owed_evaluations(store, config, run_id, done)
        if done < config.run.num_rollout or owed:
            sentence = _resuming(store, config, run_id, done, owed)
            return RunChoice(run_id, True, f"{sentence} (--new starts another)")
    return _new(config, same[-1].body["run_id"] if same else None)


def list_runs(store: Backend) -> list[Document]:
    """What every run of a store is, oldest first. A damaged entry is logged and left out: it must
    not keep other runs from starting."""
    runs = []
    for entry in store.list(INDEX):
        try:
            runs.append(read_document(store, entry.key))
        except DigestError as error:
            log.warning("a run is left out: %s", error)
    return sorted(runs, key=lambda run: str(run.by.get("created", "")))


def iterations_done(store: Backend, run_id: str) -> int:
    """Iterations with a ledger; of a run without a trainer, those with a batch."""
    prefix = f"{run_id}/{layout.ITERATIONS}"
    found = [layout.parse_iteration(e.key.removeprefix(f"{run_id}/")) for e in store.list(prefix)]
    kinds = Counter(item[1] for item in found if item is not None)
    if kinds["batch"] and not kinds["ledger"] and _is_untrained(store, run_id):
        return kinds["batch"]
    return kinds["ledger"]


def _is_untrained(store: Backend, run_id: str) -> bool:
    try:
        run = read_document(store, f"{INDEX}{run_id}.json")
    except (MissingError, DigestError):
        return False
    return bool(run.body["identity"].get("debug_rollout_only"))


def owed_evaluations(store: Backend, config: RunConfig, run_id: str, done: int) -> list[str]:
    """Datasets on which the weights after `done` iterations are to be evaluated and were not."""
    prefix = f"{run_id}/{layout.EVALS}"
    settled = set()
    for entry in store.list(prefix):
        version, _, name = entry.key.removeprefix(prefix).partition("/")
        if name.endswith(".json"):
            settled.add((int(version.rpartition("-")[2]), name.removesuffix(".json")))
    names = [dataset.name for dataset in eval_datasets(config)]
    return [one.dataset for one in owed(eval_schedule(config), names, done, settled).now]


def record_run(store: Backend, run: Backend, config: RunConfig, run_id: str) -> None:
    """Writes run.json of a new run and its entry in the index, or checks those of an old one.

    Args:
        store: root of all runs.
        run: the store below the run's prefix.

    Raises:
        ConfigError: the run was started with another identity; names the fields.
    """
    identity = values(config, "identity")
    body = {
        "run_id": run_id,
        "format_version": FORMAT_VERSION,
        "identity": identity,
        "identity_digest": identity_digest(config),
    }
    try:
        known = read_document(run, layout.RUN)
        _check_identity(run_id, known.body["identity"], identity)
    except MissingError:
        by = {"created": datetime.now(UTC).isoformat()}
        known = put_document(run, layout.RUN, body, by)
    record_config(run, config)
    # Also for a run that is known: its first start may have been killed between the two.
    put_document(store, f"{INDEX}{run_id}.json", known.body, known.by)


def record_config(run: Backend, config: RunConfig) -> None:
    """Keeps the configuration under its numeric digest, which each ledger names, so that any
    iteration can be trained again. SGLang's own options stay out: they may hold keys."""
    tree = config.model_dump(mode="json", exclude={"sglang"})
    put_document(run, layout.config(numeric_digest(config)), {"config": tree}, keep_first=True)


def recorded_config(run: Backend, numeric: str, overrides: dict[str, Any]) -> RunConfig:
    """The configuration of iterations with a numeric digest, with single values put over it. The
    layout of its ranks is left out: it is that of one rank, unless given anew.

    Raises:
        ConfigError: it was never recorded.
    """
    try:
        tree = read_document(run, layout.config(numeric)).body["config"]
    except MissingError as error:
        raise ConfigError(
            f"{run.url} does not hold the configuration {numeric[:12]}: resume the run once with "
            "it, or give the configuration"
        ) from error
    tree = tree | {"megatron": without_layout(tree.get("megatron", {}))}
    return build_config(apply_overrides(tree, overrides))


def _check_identity(run_id: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    changed = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    if changed:
        listed = ", ".join(f"{n} was {old.get(n)!r}, now {new.get(n)!r}" for n in changed)
        raise ConfigError(
            f"run {run_id} cannot go on with another identity ({listed}): set the old values, or "
            "start another run with --new"
        )


def _named(store: Backend, config: RunConfig, run_id: str) -> RunChoice:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run_id):
        raise ConfigError(
            f"run id {run_id!r}: use letters, digits, '.', '_' and '-', starting with a letter or "
            "digit, at most 100"
        )
    for run in list_runs(store):
        if run.body["run_id"] == run_id:
            _check_identity(run_id, run.body["identity"], values(config, "identity"))
            done = iterations_done(store, run_id)
            owed = owed_evaluations(store, config, run_id, done)
            wanted = config.run.num_rollout
            if done >= wanted and not owed:
                sentence = f"run {run_id} is finished ({done} of {counted(wanted, 'iteration')})"
                return RunChoice(run_id, True, sentence, finished=True)
            return RunChoice(run_id, True, _resuming(store, config, run_id, done, owed))
    return RunChoice(run_id, False, f"starting run {run_id}")


def _resuming(store: Backend, config: RunConfig, run_id: str, done: int, owed: list[str]) -> str:
    """What is left to do in a run, and why a run that had finished goes on."""
    wanted = config.run.num_rollout
    if not begun(store, run_id):
        return f"starting run {run_id}, whose last start ended before its first iteration"
    sentence = f"resuming run {run_id} after {counted(done, 'iteration')}"
    if done >= wanted:
        return f"{sentence}, to evaluate {', '.join(owed)}" if owed else sentence
    before = planned_iterations(store, run_id, done)
    if before is not None and before <= done:
        return f"{sentence}: it had finished, and num_rollout is {wanted} now"
    return sentence


def begun(store: Backend, run_id: str) -> bool:
    """Whether a run has anything to go on from: a draw, a trained iteration or an evaluation."""
    folders = (layout.DRAWS, layout.ITERATIONS, layout.EVALS)
    return any(store.list(f"{run_id}/{folder}") for folder in folders)


def planned_iterations(store: Backend, run_id: str, done: int) -> int | None:
    """num_rollout with which a run was last trained (without any iteration: started); None where
    that was not recorded.

    Args:
        store: root of all runs.
        done: iterations, as `iterations_done` counts them.
    """
    prefix = f"{run_id}/{layout.CONFIGS}"
    try:
        if done and not _is_untrained(store, run_id):
            ledger = read_document(store, f"{run_id}/{layout.ledger(done - 1)}")
            key = f"{run_id}/{layout.config(ledger.body['numeric'])}"
        else:
            key = max(store.list(prefix), key=lambda entry: entry.modified_s).key
        return int(read_document(store, key).body["config"]["run"]["num_rollout"])
    except (MissingError, KeyError, ValueError):
        return None


def _new(config: RunConfig, finished: str | None = None) -> RunChoice:
    """A new run; `finished` is the one that the same command has trained to its end."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", config.run.run_name).strip("-") or "run"
    run_id = f"{name}-{stamp}-{secrets.token_hex(2)}"
    if finished is None:
        return RunChoice(run_id, False, f"starting run {run_id}")
    all_done = f"all {counted(config.run.num_rollout, 'iteration')}"
    sentence = f"the last run {finished} is finished ({all_done}): starting run {run_id}"
    return RunChoice(run_id, False, sentence)
