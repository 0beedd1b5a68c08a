"""From the run's configuration to its evaluation datasets and schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from slime_core.config.fields import field_groups
from slime_core.config.loading import yaml_fault
from slime_core.config.strict_yaml import load
from slime_core.config.tree import RunConfig
from slime_core.errors import ConfigError
from slime_core.evaluation.datasets import EvalDataset, resolve_eval_datasets
from slime_core.evaluation.obligations import EvalSchedule


def eval_datasets(config: RunConfig) -> list[EvalDataset]:
    """All datasets with their settings resolved; none without evaluation data.

    Raises:
        ConfigError: unknown keys, a missing path, a broken YAML file.
    """
    args = {name: getattr(getattr(config, group), name) for name, group in field_groups().items()}
    args["custom_generate_function_path"] = config.rollout.generate_path
    given = config.eval.eval_config
    tree = _read(given) if isinstance(given, str) else given
    return resolve_eval_datasets(args, tree, config.eval.eval_prompt_data)


def eval_schedule(config: RunConfig) -> EvalSchedule:
    """When the run evaluates: never without engines, and without a trainer only its one version."""
    debug = config.debug
    return EvalSchedule(
        num_rollout=0 if debug.debug_rollout_only else config.run.num_rollout,
        interval=None if debug.debug_train_only else config.eval.eval_interval,
        before_train=not config.eval.skip_eval_before_train,
    )


def _read(path: str) -> dict[str, Any]:
    try:
        tree = load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"eval_config {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"eval_config {path}: is not a text file (UTF-8)") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"eval_config {path}{yaml_fault(error)}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"eval_config {path}: must hold `datasets`, and `defaults` if wanted")
    return tree
