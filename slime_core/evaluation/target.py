"""What `slime eval` is to evaluate: weights of a run, or a Hugging Face model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from slime_core.config.fields import field_groups
from slime_core.config.loading import build_config, load_config
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError
from slime_core.evaluation.resolve import eval_datasets
from slime_core.run.overview import find_run
from slime_core.run.paths import RunPaths, store_url
from slime_core.run.recorded import last_config
from slime_core.run.replay import trained_chain
from slime_core.store import layout
from slime_core.store.backend import Backend, join_url, open_backend
from slime_core.store.cache import NodeCache

DIGEST_CHARS = 12
BLOCK_BYTES = 8 * 2**20
CHECKPOINT = re.compile(r"(\d{6,})-\d{6,}")
VERSION = re.compile(r"(?:.+-)?(\d+)")


@dataclass(frozen=True)
class Place:
    """Where runs and their results are.

    Attributes:
        store: URL of the store where it is not in the workspace.
    """

    workspace: str = "runs"
    store: str | None = None


@dataclass(frozen=True)
class Target:
    """Weights that can be served, and where their results go.

    Attributes:
        config: settings of the evaluation and of the engines.
        owner: the run, or the name under which results of a model are kept.
        version: the weight version of the results, `<something>-<iterations>`.
        iterations: contained in the weights; 0 for a model.
        model: folder of a Hugging Face model; None where a run's weights are to be made.
    """

    config: RunConfig
    owner: str
    version: str
    iterations: int
    model: Path | None
    backend: Backend

    @property
    def paths(self) -> RunPaths:
        return RunPaths(Path(self.config.run.workspace).absolute(), self.owner)

    @property
    def cache(self) -> NodeCache:
        return NodeCache(self.backend, self.paths.cache)


def find_target(
    given: str,
    version: str | None,
    source: str | Mapping[str, Any] | None,
    overrides: Mapping[str, Any],
    place: Place,
) -> Target:
    """Finds what is meant. Writes nothing.

    Args:
        given: a run (id, its beginning, `last`, or its folder in a store), the folder of one of
            its checkpoints, or the folder of a Hugging Face model.
        version: iterations contained in a run's weights, or a weight version (`l0-10`); None
            takes the newest.
        source: a configuration (path or tree) with the settings of the evaluation; by default
            those that the run had last.
        overrides: single values over it.

    Raises:
        ConfigError: there is no such run, version, folder or dataset.
    """
    folder = Path(given)
    if CHECKPOINT.fullmatch(folder.name) and (folder / "manifest.json").is_file():
        if version is not None:
            raise ConfigError(f"{given} is one version already: leave --version out")
        run, number = folder.absolute().parents[1], int(folder.name.split("-")[0])
        at = Place(place.workspace, str(run.parent))
        return _of_run(run.name, str(number + 1), source, overrides, at)
    if (folder / layout.RUN).is_file():
        at = Place(place.workspace, str(folder.absolute().parent))
        return _of_run(folder.absolute().name, version, source, overrides, at)
    if folder.is_dir() and (folder / "config.json").is_file():
        if version is not None:
            raise ConfigError(f"{given} is a model, which has no versions: leave --version out")
        return _of_model(folder.absolute(), source, overrides, place)
    if folder.is_dir() or "/" in given:
        why = "holds no config.json, run.json or manifest.json" if folder.is_dir() else "is missing"
        raise ConfigError(
            f"{given} {why}: give a run's id, the folder of a checkpoint in a run's store, or the "
            "folder of a Hugging Face model"
        )
    return _of_run(given, version, source, overrides, place)


def _of_run(
    given: str,
    version: str | None,
    source: str | Mapping[str, Any] | None,
    overrides: Mapping[str, Any],
    place: Place,
) -> Target:
    url = store_url(place.workspace, place.store)
    if "://" not in url and not Path(url).is_dir():
        raise ConfigError(
            f"{given} is neither a folder nor a run: there is no store in {url} (--workspace, "
            "--store-url)"
        )
    root = open_backend(url, read_only=True)
    run_id = find_run(root, given)
    backend = open_backend(join_url(url, run_id))
    recorded = last_config(backend, {})
    chosen = recorded if source is None else load_config(_plain(source), {})
    # Where the run is, and which model it is, are facts and no settings.
    facts = {
        "workspace": place.workspace,
        "store_url": place.store,
        "hf_checkpoint": recorded.rollout.hf_checkpoint,
        "run_name": recorded.run.run_name,
    }
    config = _with(chosen, {**overrides, **facts})
    _require_datasets(config)
    cache = NodeCache(backend, RunPaths(Path(place.workspace).absolute(), run_id).cache)
    chain = trained_chain(cache)
    if not chain:
        raise ConfigError(
            f"run {run_id} has trained nothing yet: evaluate its model "
            f"{recorded.rollout.hf_checkpoint} instead"
        )
    iterations = len(chain) if version is None else _iterations(version, run_id, len(chain))
    name = chain[iterations - 1].weight_version if iterations else "l0-0"
    if version not in (None, name, str(iterations)):
        raise ConfigError(f"run {run_id} has no weights {version}: those after {iterations} "
                          f"iterations are {name}")  # fmt: skip
    return Target(config, run_id, name, iterations, None, backend)


def _of_model(
    folder: Path,
    source: str | Mapping[str, Any] | None,
    overrides: Mapping[str, Any],
    place: Place,
) -> Target:
    given = {**overrides, "hf_checkpoint": str(folder), "workspace": place.workspace,
             "store_url": place.store}  # fmt: skip
    if source is not None:
        config = _with(load_config(_plain(source), {}), given)
    else:
        config = load_config(_bare_tree(folder, overrides), given)
    datasets = _require_datasets(config)
    if source is None:
        config = load_config(config.model_dump(), {"prompt_data": datasets[0].path})
    digest = model_digest(folder)[:DIGEST_CHARS]
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.name).strip("-.") or "model"
    owner = f"model-{name}-{digest}"
    url = store_url(place.workspace, place.store)
    backend = open_backend(join_url(url, owner))
    return Target(config, owner, f"{digest}-0", 0, folder, backend)


def model_digest(folder: Path) -> str:
    """xxh3-128 (hex) over the names and contents of a model's JSON files and weights."""
    state = xxhash.xxh3_128()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".model", ".txt", ".jinja"):
            continue
        state.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                state.update(block)
    return state.hexdigest()


def _bare_tree(folder: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The least configuration of an evaluation; what it lacks is asked for by name."""
    longest = overrides.get("eval_max_response_len")
    lengths = {} if longest is None else {"rollout_max_response_len": longest}
    return {
        "run": {"run_name": folder.name, "num_rollout": 0},
        "data": {"prompt_data": str(folder)},
        "rollout": {"rollout_batch_size": 1, **lengths},
        "eval": {"eval_interval": 1} if _names_data(overrides) else {},
    }


def _names_data(overrides: Mapping[str, Any]) -> bool:
    return any(overrides.get(name) for name in ("eval_config", "eval_prompt_data"))


def _with(config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """Single values over a configuration. Datasets that are given take the place of its own."""
    tree = config.model_dump()
    if _names_data(overrides):
        interval = tree["eval"]["eval_interval"] or 1
        tree["eval"] |= {"eval_config": None, "eval_prompt_data": [], "eval_interval": interval}
    groups = field_groups()
    for name, value in overrides.items():
        if name in groups:
            tree[groups[name]][name] = value
    others = {name: value for name, value in overrides.items() if name not in groups}
    return load_config(tree, others) if others else build_config(tree, given=overrides)


def _require_datasets(config: RunConfig) -> list[Any]:
    datasets = eval_datasets(config)
    if not datasets:
        raise ConfigError(
            "there is nothing to evaluate on: give --eval-config FILE.yaml or --eval-prompt-data "
            "NAME FILE"
        )
    return datasets


def _iterations(version: str, run_id: str, trained: int) -> int:
    found = VERSION.fullmatch(version)
    if found is None or int(found[1]) > trained:
        raise ConfigError(
            f"run {run_id} has no version {version}: it has the weights after 0 to {trained} "
            "iterations"
        )
    return int(found[1])


def _plain(source: str | Mapping[str, Any]) -> str | dict[str, Any]:
    return source if isinstance(source, str) else dict(source)
