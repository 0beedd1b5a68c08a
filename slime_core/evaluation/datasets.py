"""Evaluation datasets and their settings.

Precedence, field by field: the dataset's own entry, then `defaults`, then the `--eval-*` flag, then
the `--rollout-*` flag (or the training data's key).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError
from slime_core.evaluation.kinds import wrong_values
from slime_core.near import nearest

# Fields whose flag is not called eval_<field> or rollout_<field>.
OTHER_FLAGS = {
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt",),
    "rm_type": (),
    "custom_rm_path": (),
    "metadata_key": ("metadata_key",),
    "multimodal_keys": ("multimodal_keys",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "custom_generate_function_path": ("custom_generate_function_path",),
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
}


@dataclass(frozen=True)
class EvalDataset:
    """One dataset of an evaluation, all settings resolved; None leaves a setting to the engine.

    The fields from `app_service` on are for custom functions; the evaluation itself does not read
    them.
    """

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str = "input"
    label_key: str | None = None
    tool_key: str | None = "tools"
    metadata_key: str = "metadata"
    multimodal_keys: Mapping[str, str] | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    n_samples_per_eval_prompt: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    max_prompt_len: int | None = None
    stop: Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: Mapping[str, Any] = field(default_factory=dict)
    app_service: Any = None
    eval_task_timeout: float | None = None
    min_eval_samples: int | None = None
    eval_early_stop_remaining: int | None = None
    eval_early_stop_idle_timeout: float | None = None
    message_processor: str | None = None
    reward_model: Any = None
    remote_environment: Any = None

    @property
    def greedy(self) -> bool:
        """Whether decoding is deterministic."""
        return self.temperature == 0


FIELDS = {item.name: item for item in fields(EvalDataset)}


def resolve_eval_datasets(
    args: Mapping[str, Any],
    eval_config: Mapping[str, Any] | None = None,
    eval_prompt_data: Sequence[Any] = (),
) -> list[EvalDataset]:
    """All evaluation datasets with their settings.

    Args:
        args: values of the flags by name (`eval_temperature`, `rollout_top_p`, `input_key` ...);
            None counts as not given.
        eval_config: `{"defaults": {...}, "datasets": [...]}`, also under a key `eval`; datasets
            are a list of entries with `name`, or a mapping from name to entry.
        eval_prompt_data: what `--eval-prompt-data` collected: NAME PATH pairs in any nesting; one
            path alone is named after its file.

    Raises:
        ConfigError: unknown keys (with the nearest known one), a missing path, doubled names or
            values that cannot be.
    """
    config = dict(eval_config or {})
    if "eval" in config:
        _refuse_unknown(config, ["eval"], "the evaluation file")
        config = _mapping(config["eval"] or {}, "`eval` of the evaluation file")
    _refuse_unknown(config, ["defaults", "datasets"], "the evaluation settings")
    defaults = _entry(config.get("defaults") or {}, "eval defaults")
    if "name" in defaults:
        raise ConfigError("eval defaults cannot hold `name`; it belongs to a dataset")
    entries = [*_entries(config.get("datasets")), *_pairs(eval_prompt_data)]
    names = [entry["name"] for entry in entries]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ConfigError(f"two evaluation datasets are named {doubled[0]!r}; rename one")
    return [_resolved(entry, defaults, args) for entry in entries]


def _entries(datasets: Any) -> list[dict[str, Any]]:
    if datasets is None:
        return []
    if isinstance(datasets, Mapping):
        datasets = [
            {"name": name, **_mapping(entry or {}, f"eval dataset {name!r}")}
            for name, entry in datasets.items()
        ]
    if not isinstance(datasets, Sequence) or isinstance(datasets, str):
        raise ConfigError("eval datasets must be a list of entries or a mapping from names")
    entries = []
    for number, raw in enumerate(datasets, 1):
        entry = _entry(raw, f"eval dataset {number}")
        if not entry.get("name"):
            raise ConfigError(f"eval dataset {number} needs a `name`")
        entries.append(_entry(raw, f"eval dataset {entry['name']!r}"))
    return entries


def _entry(raw: Any, where: str) -> dict[str, Any]:
    entry = _mapping(raw, where)
    _refuse_unknown(entry, FIELDS, where)
    return entry


def _mapping(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where} must hold keys and values, such as `path:`, not {raw!r}")
    return dict(raw)


def _refuse_unknown(found: Iterable[str], known: Iterable[str], where: str) -> None:
    known = list(known)
    for key in found:
        if key in known:
            continue
        close = nearest(str(key), known)
        hint = f"did you mean {close!r}?" if close else f"known: {', '.join(known)}"
        raise ConfigError(f"unknown key {key!r} in {where}; {hint}")


def _pairs(given: Sequence[Any]) -> list[dict[str, Any]]:
    words: list[str] = []
    for item in given:
        words.extend([item] if isinstance(item, str) else item)
    if len(words) == 1:
        return [{"name": Path(words[0].partition("@[")[0]).name.split(".")[0], "path": words[0]}]
    if len(words) % 2:
        raise ConfigError(
            f"--eval-prompt-data takes pairs of NAME PATH; {words[-1]!r} stands alone"
        )
    return [
        {"name": name, "path": path} for name, path in zip(words[::2], words[1::2], strict=True)
    ]


def _grader(*levels: Mapping[str, Any]) -> dict[str, Any]:
    """Grader of the first level that names one, so that a lower level's function cannot win."""
    names = ("custom_rm_path", "rm_type")
    for level in levels:
        if any(level.get(name) is not None for name in names):
            return {name: level.get(name) for name in names}
    return {}


def _resolved(
    entry: Mapping[str, Any], defaults: Mapping[str, Any], args: Mapping[str, Any]
) -> EvalDataset:
    values: dict[str, Any] = {}
    for name in FIELDS:
        candidates = [entry.get(name), defaults.get(name)]
        flags = OTHER_FLAGS.get(name, (f"eval_{name}", f"rollout_{name}"))
        candidates += [args.get(flag) for flag in flags]
        given = [value for value in candidates if value is not None]
        if given:
            values[name] = given[0]
    values |= _grader(entry, defaults, args)
    label = f"eval dataset {values['name']!r}"
    if not values.get("path"):
        raise ConfigError(f"{label} needs a `path`")
    if problems := wrong_values(values):
        raise ConfigError("\n".join(f"{label}: {problem}" for problem in problems))
    return EvalDataset(**values)
