"""MLflow as a tracker: one run per training, one batch of metrics per record.

`mlflow` is imported in the tracker's own thread, since that import takes longer than a start may.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_core.config.secrets import HIDDEN, is_secret
from slime_core.tracking.outbox import TrackerAway, TrackerRefused
from slime_core.tracking.projection import Record
from slime_core.tracking.registry import sanitised
from slime_core.tracking.system import SystemMetrics

log = logging.getLogger(__name__)
RUN_TAG = "slime.run_id"
LAST = "progress/iteration"
WEIGHTS = "weights"
TABLES_TAG, TABLES_KEPT = "mlflow.loggedArtifacts", 50
METRICS_A_CALL, PARAMS_A_CALL = 1000, 100
VALUE_MOST_CHARS = 6000
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "GIT_PYTHON_REFRESH": "quiet",
}
LASTING_ERRORS = ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED")
LASTING_ERRORS += ("UNAUTHENTICATED", "BAD_REQUEST", "ENDPOINT_NOT_FOUND", "INVALID_STATE")


def database_uri(workspace: Path) -> str:
    """The workspace's own MLflow database."""
    return f"sqlite:///{workspace.absolute() / 'mlflow' / 'mlflow.db'}"


@dataclass(frozen=True)
class MlflowSettings:
    """Where MLflow is and what describes the run.

    Attributes:
        uri: tracking server or database.
        experiment: name of the experiment.
        run_id: the training's id (not MLflow's).
        artifacts: where the artifacts of a database in the workspace go; None lets the server say.
        attach_to: id of an MLflow run to write into (MLFLOW_RUN_ID).
        params: the configuration.
        tags: further tags.
        system_metrics: send the machine's load, too.
        guest: adds to a run of another process: where that run exists, neither its state nor its
            parameters are touched.
    """

    uri: str
    experiment: str
    run_id: str
    artifacts: Path | None = None
    attach_to: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    system_metrics: bool = False
    guest: bool = False

    @classmethod
    def choose(
        cls,
        workspace: Path,
        run_id: str,
        uri: str | None,
        experiment: str | None,
        params: dict[str, Any],
        tags: dict[str, str],
        system_metrics: bool = False,
    ) -> MlflowSettings:
        """Takes the configured values, then MLFLOW_* of the environment, then the workspace."""
        own = database_uri(workspace)
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or own
        return cls(
            uri=uri,
            experiment=experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "slime-flow",
            run_id=run_id,
            artifacts=workspace.absolute() / "mlflow" / "artifacts" if uri == own else None,
            attach_to=os.environ.get("MLFLOW_RUN_ID"),
            params=params,
            tags=tags,
            system_metrics=system_metrics,
        )


def page_of(settings: MlflowSettings) -> str | None:
    """Path of the run's page below MLflow's address; None where MLflow has no such run or does not
    answer. It loads mlflow, which takes seconds the first time."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    try:
        with _translated(settings.uri):
            if settings.uri.startswith("sqlite:///") and not _database(settings.uri).is_file():
                return None
            client = MlflowClient(settings.uri)
            if settings.attach_to:
                info = client.get_run(settings.attach_to).info
                return f"#/experiments/{info.experiment_id}/runs/{info.run_id}"
            experiment = client.get_experiment_by_name(settings.experiment)
            if experiment is None:
                return None
            found = client.search_runs(
                [experiment.experiment_id], f"tags.`{RUN_TAG}` = '{settings.run_id}'", max_results=1
            )
    except (TrackerAway, TrackerRefused) as error:
        log.info("MLflow does not say which run it is: %s", error)
        return None
    if not found:
        return None
    return f"#/experiments/{experiment.experiment_id}/runs/{found[0].info.run_id}"


def _database(uri: str) -> Path:
    """File of a SQLite URI."""
    return Path(uri.removeprefix("sqlite:///"))


class MlflowTracker:
    """Sends records to one MLflow run, which a resumed training finds again by its tag.

    Args:
        settings: where and what.
        samples: rows for the sample table of an evaluation, by the record's key.
    """

    name = "MLflow"

    def __init__(
        self,
        settings: MlflowSettings,
        samples: Callable[[str], list[dict[str, Any]]] | None = None,
    ) -> None:
        self._settings = settings
        self._samples = samples
        self._client: Any = None
        self._last_iteration = -1
        self._evaluated: dict[str, set[int]] = {}
        self._tables: list[str] = []
        self._begun_s = 0.0
        self._system: SystemMetrics | None = None
        self._late_tags: dict[str, str] = {}
        self._weights: Path | None = None
        self._guest = False
        self.mlflow_run_id: str | None = None

    def add_tags(self, tags: dict[str, str]) -> None:
        """Tags that are known only later; they go with the next record. Call it in any thread."""
        self._late_tags = {**self._late_tags, **tags}

    def add_weights(self, folder: Path) -> None:
        """A folder that becomes the artifact `weights` when the run finishes."""
        self._weights = folder

    def connect(self) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        with _translated(self._settings.uri):
            if self._settings.uri.startswith("sqlite:///"):
                _database(self._settings.uri).parent.mkdir(parents=True, exist_ok=True)
            self._client = MlflowClient(self._settings.uri)
            run = self._client.get_run(self._find_run())
            self.mlflow_run_id = run.info.run_id
            if not self._guest:
                if run.info.status != "RUNNING":
                    self._client.set_terminated(self.mlflow_run_id, "RUNNING")
                self._describe(run.data.params)
            self._last_iteration = int(run.data.metrics.get(LAST, -1))
            tables = json.loads(run.data.tags.get(TABLES_TAG, "[]"))
            self._tables = [table["path"] for table in tables]
            self._begun_s = run.info.start_time / 1000
        if self._settings.system_metrics and self._system is None:
            self._system = SystemMetrics(self._send_system, (TrackerAway, TrackerRefused))
            self._system.start()

    def has(self, record: Record) -> bool:
        if record.is_iteration:
            return record.step <= self._last_iteration
        if not record.metrics:
            return True  # nothing to send
        with _translated(self._settings.uri):
            return record.step in self._steps_of(_marker(record))

    def send(self, record: Record) -> None:
        from mlflow.entities import Metric

        if len(record.metrics) > METRICS_A_CALL:
            raise TrackerRefused(
                f"{record.key} has {len(record.metrics)} metrics, MLflow takes {METRICS_A_CALL} at "
                "once: let plug-ins return fewer"
            )
        time_ms = int(record.time_s * 1000)
        metrics = [
            Metric(sanitised(name), value, time_ms, record.step)
            for name, value in record.metrics.items()
        ]
        with _translated(self._settings.uri):
            if not record.is_iteration:
                self._log_samples(record)
            self._send_tags()  # before the metrics: it may be repeated, they may not
            self._client.log_batch(self.mlflow_run_id, metrics=metrics)

    def finish(self, status: str) -> None:
        if self._system is not None:
            self._system.finish()
        with _translated(self._settings.uri):
            self._send_tags()
            if self._weights is not None and status == "FINISHED":
                self._client.log_artifacts(self.mlflow_run_id, str(self._weights), WEIGHTS)
            if not self._guest:
                self._client.set_terminated(self.mlflow_run_id, status)

    def _send_tags(self) -> None:
        from mlflow.entities import RunTag

        tags = self._late_tags
        if tags:
            listed = [RunTag(key, value) for key, value in tags.items()]
            self._client.log_batch(self.mlflow_run_id, tags=listed)
            self._late_tags = {}

    def _send_system(self, time_s: float, numbers: dict[str, float]) -> None:
        """The step is the second of the run, so that a resume goes on behind what is there."""
        from mlflow.entities import Metric

        step = int(time_s - self._begun_s)
        metrics = [Metric(name, value, int(time_s * 1000), step) for name, value in numbers.items()]
        with _translated(self._settings.uri):
            self._client.log_batch(self.mlflow_run_id, metrics=metrics)

    def _find_run(self) -> str:
        """MLflow's id of our run: given, found by its tag, or made."""
        if self._settings.attach_to:
            self._guest = self._settings.guest
            return self._settings.attach_to
        experiment = self._experiment_id()
        found = self._client.search_runs(
            [experiment], f"tags.`{RUN_TAG}` = '{self._settings.run_id}'", max_results=1
        )
        if found:
            self._guest = self._settings.guest
            return found[0].info.run_id
        tags = {RUN_TAG: self._settings.run_id}
        made = self._client.create_run(experiment, tags=tags, run_name=self._settings.run_id)
        return made.info.run_id

    def _experiment_id(self) -> str:
        name = self._settings.experiment
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        artifacts = self._settings.artifacts
        return self._client.create_experiment(name, artifacts.as_uri() if artifacts else None)

    def _describe(self, known: dict[str, str]) -> None:
        """Logs parameters that are new. MLflow never changes one: a new value becomes a tag."""
        from mlflow.entities import Param, RunTag

        params = flattened(self._settings.params)
        new = [Param(key, value) for key, value in params.items() if key not in known]
        for start in range(0, len(new), PARAMS_A_CALL):
            self._client.log_batch(self.mlflow_run_id, params=new[start : start + PARAMS_A_CALL])
        tags = {RUN_TAG: self._settings.run_id, **self._settings.tags}
        for key, value in params.items():
            if known.get(key, value) != value:
                tags[f"slime.now.{key}"] = value
        self._client.log_batch(
            self.mlflow_run_id, tags=[RunTag(key, value) for key, value in tags.items()]
        )

    def _steps_of(self, marker: str) -> set[int]:
        if marker not in self._evaluated:
            history = self._client.get_metric_history(self.mlflow_run_id, marker)
            self._evaluated[marker] = {item.step for item in history}
        return self._evaluated[marker]

    def _log_samples(self, record: Record) -> None:
        """The table goes first: it may be written twice, the metrics behind it may not."""
        rows = self._samples(record.key) if self._samples else []
        if not rows:
            return
        names = list(rows[0])
        table = {"columns": names, "data": [[row.get(name) for name in names] for row in rows]}
        file = f"samples/{sanitised(record.key.removeprefix('evals/'))}.json"
        self._client.log_dict(self.mlflow_run_id, table, file)
        others = [path for path in self._tables if path != file]
        self._tables = [*others[-TABLES_KEPT + 1 :], file]
        listed = json.dumps([{"path": path, "type": "table"} for path in self._tables])
        self._client.set_tag(self.mlflow_run_id, TABLES_TAG, listed)


def flattened(params: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Configuration as MLflow parameters: `megatron.x` for options in dicts, secrets hidden."""
    found: dict[str, str] = {}
    for key, value in params.items():
        name = f"{prefix}{key}"
        if is_secret(key):
            found[sanitised(name)] = HIDDEN
        elif isinstance(value, dict) and value:
            found |= flattened(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            found[sanitised(name)] = text[:VALUE_MOST_CHARS]
    return found


def _marker(record: Record) -> str:
    """A metric that every record of this dataset has, whichever it is."""
    return sanitised(min(record.metrics))


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Turns what mlflow raises into `away` (try again) or `refused` (never)."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except MlflowException as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        if error.error_code in LASTING_ERRORS:
            raise TrackerRefused(f"{uri} refuses: {first_line}") from error
        raise TrackerAway(f"{uri}: {first_line}") from error
    except (RequestException, SQLAlchemyError, OSError) as error:
        raise TrackerAway(f"{uri}: {type(error).__name__}") from error
