"""Where a run writes: workspace, store, MLflow. Nothing is left there."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlsplit

from slime_core.check.findings import Findings
from slime_core.config.block_names import blocks_in
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError, SlimeError
from slime_core.run.identity import INDEX
from slime_core.run.paths import store_url
from slime_core.store.backend import open_backend
from slime_core.tracking.mlflow import database_uri

SQLITE = "sqlite:///"
MLFLOW_SCHEMES = ("sqlite", "http", "https", "file", "mysql", "postgresql", "mssql")
MLFLOW_SCHEMES += ("databricks", "uc")
ANSWER_S = 3.0


def check_places(config: RunConfig, thorough: bool, findings: Findings) -> None:
    """Looks whether every place can be written.

    Args:
        thorough: also ask servers (an object store, MLflow), which may take seconds.
    """
    workspace = Path(config.run.workspace).absolute()
    before = len(findings.problems)
    findings.attempt(lambda: writable(workspace, "workspace", "--workspace"))
    usable = len(findings.problems) == before  # otherwise what lies in it has the same fault
    url = store_url(config.run.workspace, config.store.store_url)
    named = findings.attempt(lambda: blocks_in(config)) or {}
    if named:
        listed = ", ".join(f"{field} block:{name}" for field, name in named.items())
        findings.notes.append(
            f"not looked at, since blocks stand in Prefect: {listed}; a start asks"
        )
    if "store_url" not in named and (usable or config.store.store_url):
        findings.attempt(lambda: _store(url, thorough))
    findings.fact("places", workspace=str(workspace), store=url)
    if config.train.save_hf is not None:
        folder = Path(config.train.save_hf.format(rollout_id=0)).absolute()
        findings.attempt(lambda: writable(folder.parent, "save_hf", "--save-hf"))
    if config.tracking.use_mlflow:
        uri = config.tracking.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        findings.fact("places", mlflow=uri or database_uri(workspace))
        if "mlflow_tracking_uri" not in named and (usable or uri):
            findings.attempt(lambda: _mlflow(uri or database_uri(workspace), thorough, findings))


def writable(folder: Path, name: str, flag: str) -> None:
    """Makes an unnamed file where the folder is, or would be made.

    Raises:
        ConfigError: that fails.
    """
    # What may not be looked at counts as not there: the folder above it then says so.
    existing = next(place for place in (folder, *folder.parents) if os.access(place, os.F_OK))
    if not existing.is_dir():
        raise ConfigError(f"{name} {folder}: {existing} is a file: choose another with {flag}")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(
            f"{name} {folder} cannot be written ({existing}: {error.strerror}): choose another "
            f"with {flag}"
        ) from error


def _store(url: str, thorough: bool) -> None:
    parts = urlsplit(url)
    if parts.scheme == "file" or "://" not in url:
        folder = Path(unquote(parts.path) if parts.scheme == "file" else url)
        writable(folder.absolute(), "store", "--store-url")
        return
    backend = open_backend(url)  # refuses the scheme
    if thorough:
        try:
            backend.list(INDEX)
        except SlimeError as error:
            raise ConfigError(f"store {url} cannot be used: {error}") from error


def _mlflow(uri: str, thorough: bool, findings: Findings) -> None:
    if uri.startswith(SQLITE):
        _database(Path(uri.removeprefix(SQLITE)).absolute())
    elif "://" in uri and urlsplit(uri).scheme.partition("+")[0] not in MLFLOW_SCHEMES:
        raise ConfigError(
            f"MLflow cannot be reached at {uri}: give sqlite:///PATH or http://HOST:PORT with "
            "--mlflow-tracking-uri, or --no-use-mlflow"
        )
    elif uri.startswith("http") and thorough and not _answers(f"{uri.rstrip('/')}/health"):
        findings.notes.append(f"MLflow at {uri} does not answer; metrics would wait for it")


def _database(path: Path) -> None:
    """Begins a write and takes it back.

    Raises:
        ConfigError: the database, or the folder it would be made in, cannot be written.
    """
    fix = "choose another with --mlflow-tracking-uri sqlite:///PATH, or --no-use-mlflow"
    if not path.exists():
        try:
            writable(path.parent, "MLflow's folder", "--mlflow-tracking-uri sqlite:///PATH")
        except ConfigError as error:
            raise ConfigError(f"{error}, or --no-use-mlflow") from error
        return
    if not os.access(path, os.W_OK):
        raise ConfigError(f"MLflow's database {path} is read-only: {fix}")
    try:
        connection = sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=0.1)
        with contextlib.closing(connection):
            connection.execute("begin immediate")
            connection.rollback()
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):  # somebody writes, so it can be written
            raise ConfigError(f"MLflow's database {path} cannot be written: {fix}") from error
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{path} is not an MLflow database: {fix}") from error


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S):
            return True
    except OSError:
        return False
