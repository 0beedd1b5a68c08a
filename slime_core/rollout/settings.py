"""What a rollout worker is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slime_core.config.tree import RunConfig


@dataclass(frozen=True)
class RolloutSettings:
    """Everything a rollout worker needs, in picklable form.

    Attributes:
        store_url: root of the store; the run's prefix is its run id.
        cache: node-local folder into which written parts are teed.
    """

    config: RunConfig
    run_id: str
    store_url: str
    cache: Path
    log_file: Path


@dataclass(frozen=True)
class EvalJob:
    """One owed evaluation.

    Attributes:
        iteration: iterations contained in the weights (0 for the initial ones).
        version: weight version that must answer.
        dataset: name of the dataset in the evaluation configuration.
    """

    iteration: int
    version: str
    dataset: str
