"""Megatron's and SGLang's own options: names, types, and values that the model contradicts."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from slime_core.check.findings import Findings
from slime_core.cluster.device import Device
from slime_core.cluster.engine_choice import EngineKind
from slime_core.cluster.trainer_settings import trainer_settings
from slime_core.config.tree import RunConfig
from slime_core.engines.sglang_options import needs_sglang, option_list, option_problems
from slime_core.megatron.arguments import check_names, resolve
from slime_core.megatron.declared import declared_fields
from slime_core.megatron.divisible import check_divisible
from slime_core.megatron.option_bounds import check_recompute
from slime_core.megatron.selection import trained_names
from slime_core.weights.tables import ModelShape, bind


def check_megatron(
    config: RunConfig, device: Device, shape: ModelShape | None, findings: Findings
) -> bool:
    """Checks each option by itself, so that all wrong ones are told at once, then all together.

    Returns:
        Whether all are right.
    """
    before = len(findings.problems)
    _note_seq_length(config, findings)
    for name, value in config.megatron.items():
        findings.attempt(lambda n=name, v=value: check_names({n: v}))
    if shape is None or len(findings.problems) > before:
        return len(findings.problems) == before
    # A start finds a port for the ranks to meet; here any number stands for it.
    settings = findings.attempt(lambda: trainer_settings(config, device, 0, 1))
    if settings is None:
        return False
    classes = declared_fields()
    for name, value in settings.megatron.items():
        one = replace(settings, megatron={name: value})
        findings.attempt(lambda s=one: resolve(s, shape, classes))
    resolved = None
    if len(findings.problems) == before:
        resolved = findings.attempt(lambda: resolve(settings, shape, classes))
    if resolved is not None:
        findings.attempt(resolved.settings.check)
        findings.attempt(lambda: check_recompute(resolved.transformer))
        findings.attempt(lambda: check_divisible(resolved.settings, shape, resolved.transformer))
        train = config.train
        only, frozen = train.only_train_params_name_list, train.freeze_params_name_list
        names = [entry.megatron for entry in bind(shape)]
        findings.attempt(lambda: trained_names(names, only, frozen))
        if resolved.without_effect:
            listed = ", ".join(sorted(resolved.without_effect))
            findings.notes.append(f"megatron: without effect here: {listed}")
    return len(findings.problems) == before


def _note_seq_length(config: RunConfig, findings: Findings) -> None:
    length, rollout = config.megatron.get("seq_length"), config.rollout
    longest = rollout.rollout_max_context_len or (
        (config.data.rollout_max_prompt_len or 0) + rollout.rollout_max_response_len
    )
    if isinstance(length, int) and length < longest:
        findings.notes.append(
            f"--seq-length {length} is shorter than the {longest} tokens that a sequence may have; "
            "it bounds nothing here, sequences are packed"
        )


def check_sglang(config: RunConfig, kind: EngineKind, findings: Findings) -> None:
    """Checks the engine's options, also where the embedded engine will serve."""
    problems = option_problems(config.sglang, embedded=kind == "embedded")
    if _other_version():
        findings.notes += [f"not in the list of SGLang {option_list().version}: {p}"
                           for p in problems]  # fmt: skip
    else:
        for sentence in problems:
            findings.problem(sentence)
    ignored = needs_sglang(config.sglang)
    if kind == "embedded" and ignored:
        flags = ", ".join(f"--sglang-{name.replace('_', '-')}" for name in ignored)
        findings.notes.append(f"needs SGLang, so the embedded engine ignores it: {flags}")


def _other_version() -> bool:
    """SGLang is installed in another version than the one whose options are known."""
    try:
        return version("sglang") != option_list().version
    except PackageNotFoundError:
        return False
