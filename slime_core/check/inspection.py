"""The whole check: every problem at once, before any process starts."""

from __future__ import annotations

from slime_core.check.algorithm import check_groups
from slime_core.check.cluster import check_cluster
from slime_core.check.data import Keys, Scan, scan, show_prompt
from slime_core.check.findings import Findings
from slime_core.check.lengths import Wanted, check_lengths
from slime_core.check.media import check_media
from slime_core.check.model import check_models
from slime_core.check.options import check_megatron, check_sglang
from slime_core.check.places import check_places
from slime_core.check.plan import plan
from slime_core.check.plugins import (
    check_grader,
    check_rewards,
    check_rollout,
    check_template,
    check_trainer_hooks,
    label_needed,
)
from slime_core.check.tokenizer import open_tokenizer
from slime_core.cluster.device import Device, resolve_device
from slime_core.cluster.engine_choice import EngineKind, resolve_engine
from slime_core.config.fields import values
from slime_core.config.tree import RunConfig
from slime_core.data.sources import SourceSettings
from slime_core.evaluation.datasets import EvalDataset
from slime_core.evaluation.resolve import eval_datasets

START_SCAN_S = 0.3
"""A start reads each prompts file for so long; the rollout worker reads the rest anyway."""
CHECK_SCAN_S = 2.0


def require(config: RunConfig) -> list[str]:
    """What a start does before it chooses its run.

    Returns:
        Notes for the person who starts it.

    Raises:
        ConfigError: tells all problems.
    """
    findings = inspect(config, scan_s=START_SCAN_S, thorough=False)
    findings.raise_problems()
    return findings.notes


def inspect(config: RunConfig, *, scan_s: float, thorough: bool) -> Findings:
    """Looks at everything that can be known before a start. Starts and writes nothing.

    Args:
        scan_s: time for reading one prompts file.
        thorough: also ask servers whether they answer.
    """
    findings = Findings()
    shape = check_models(config, findings)
    tokenizer = open_tokenizer(config.rollout.hf_checkpoint, findings)
    datasets = findings.attempt(lambda: eval_datasets(config)) or []
    scans = _scans(config, datasets, scan_s, findings)
    check_rewards(config, datasets, findings)
    check_rollout(config, datasets, findings)
    check_media(config, findings, trains=True)
    check_template(config, tokenizer, findings)
    check_trainer_hooks(config, findings)
    check_groups(config, findings)
    for name in sorted({name for found, _ in scans for name in found.graders}):
        findings.attempt(lambda n=name: check_grader(n))
    if scans and not show_prompt(scans[0][0], tokenizer, findings):
        tokenizer = None  # said once; lengths are compared without it
    if shape is not None:
        check_lengths(config, shape, scans, tokenizer, findings)
    cluster = check_cluster(config, findings)
    gpus = None if cluster is None else cluster.gpus_of_a_node
    device: Device | None = findings.attempt(lambda: resolve_device(config, cluster_gpus=gpus))
    if device is not None:
        known = shape if check_megatron(config, device, shape, findings) else None
        asked: EngineKind | None = findings.attempt(lambda: resolve_engine(config, device))
        kind = asked or "embedded"
        check_sglang(config, kind, findings)
        found = findings.attempt(lambda: plan(config, device, kind, known))
        findings.fact("plan", **(found or {}))
    check_places(config, thorough, findings)
    return findings


def _scans(
    config: RunConfig, datasets: list[EvalDataset], scan_s: float, findings: Findings
) -> list[tuple[Scan, Wanted]]:
    """The training's prompts, then those of each evaluation dataset."""
    given = {**values(config, "identity"), **values(config, "operational")}
    names = SourceSettings.__dataclass_fields__
    settings = SourceSettings(**{name: given[name] for name in names if name in given})
    keys = Keys("prompt_data", "input_key", "label_key")
    wanted = Wanted("rollout_max_response_len", config.rollout.rollout_max_response_len)
    found = []
    given = config.data.prompt_data or []
    for spec in [given] if isinstance(given, str) else given:
        first = findings.attempt(lambda s=spec: scan(s, settings, keys, scan_s))
        if first is None:
            continue
        first.chat = config.rollout.generate_path is not None
        found.append((first, wanted))
        rows = first.rows if first.complete else f"the first {first.rows}"
        if isinstance(given, str):
            findings.fact("data", prompt_data=spec, rows=rows)
        else:
            findings.fact("data", **{spec: f"{rows} rows"})
        _labels(config, first, findings)
    return found + scan_datasets(config, datasets, scan_s, findings)


def scan_datasets(
    config: RunConfig, datasets: list[EvalDataset], scan_s: float, findings: Findings
) -> list[tuple[Scan, Wanted]]:
    """The prompts of each evaluation dataset; a file that several read alike is read once."""
    found: list[tuple[Scan, Wanted]] = []
    done = set()
    for dataset in datasets:
        settings = _settings_of(dataset, config)
        mark = (dataset.path, settings.input_key, settings.label_key, dataset.max_response_len)
        if mark in done:
            continue
        done.add(mark)
        found += _dataset(dataset, settings, config, scan_s, findings)
    return found


def _dataset(
    dataset: EvalDataset,
    settings: SourceSettings,
    config: RunConfig,
    scan_s: float,
    findings: Findings,
) -> list[tuple[Scan, Wanted]]:
    keys = Keys(f"eval dataset {dataset.name}", "eval_input_key", "eval_label_key")
    seen = findings.attempt(lambda: scan(dataset.path, settings, keys, scan_s))
    if seen is None:
        return []
    seen.chat = dataset.custom_generate_function_path is not None
    rows = seen.rows if seen.complete else f"the first {seen.rows}"
    findings.fact("data", **{f"eval {dataset.name}": f"{rows} rows of {dataset.path}"})
    return [(seen, Wanted(_length_field(dataset, config), dataset.max_response_len or 1))]


def _length_field(dataset: EvalDataset, config: RunConfig) -> str:
    """Where a dataset's longest response was set."""
    if dataset.max_response_len == config.eval.eval_max_response_len:
        return "eval_max_response_len"
    if dataset.max_response_len == config.rollout.rollout_max_response_len:
        return "rollout_max_response_len"
    return f"eval dataset {dataset.name}: max_response_len"


def _settings_of(dataset: EvalDataset, config: RunConfig) -> SourceSettings:
    return SourceSettings(
        input_key=dataset.input_key,
        label_key=dataset.label_key,
        metadata_key=dataset.metadata_key,
        tool_key=dataset.tool_key,
        multimodal_keys=dataset.multimodal_keys,
        apply_chat_template=dataset.apply_chat_template,
        apply_chat_template_kwargs=dataset.apply_chat_template_kwargs,
        rollout_max_prompt_len=dataset.max_prompt_len,
        max_bad_rows=config.data.max_bad_rows,
    )


def _labels(config: RunConfig, found: Scan, findings: Findings) -> None:
    grader = label_needed(config)
    if grader and not found.labels and not found.graders:
        findings.problem(
            f"prompt_data: no row of {found.spec} has a label under {config.data.label_key!r} "
            f"(all are null), which the grader {grader} compares with: choose another --label-key"
        )
