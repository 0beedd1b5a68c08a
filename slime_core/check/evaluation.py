"""What can be known of an evaluation before its processes start."""

from __future__ import annotations

from slime_core.check.findings import Findings
from slime_core.check.inspection import START_SCAN_S, scan_datasets
from slime_core.check.lengths import check_lengths
from slime_core.check.media import check_media
from slime_core.check.model import check_models
from slime_core.check.options import check_sglang
from slime_core.check.places import check_places
from slime_core.check.plugins import check_grader, check_rewards, check_rollout, check_template
from slime_core.check.tokenizer import open_tokenizer
from slime_core.cluster.device import Device, resolve_device
from slime_core.cluster.engine_choice import EngineKind, resolve_engine
from slime_core.config.tree import RunConfig
from slime_core.evaluation.resolve import eval_datasets


def require_evaluation(config: RunConfig) -> None:
    """Looks at the model, every dataset and what answers and grades it.

    Raises:
        ConfigError: tells all problems.
    """
    findings = Findings()
    shape = check_models(config, findings)
    tokenizer = open_tokenizer(config.rollout.hf_checkpoint, findings)
    datasets = findings.attempt(lambda: eval_datasets(config)) or []
    scans = scan_datasets(config, datasets, START_SCAN_S, findings)
    check_rewards(config, datasets, findings)
    check_rollout(config, datasets, findings)
    check_media(config, findings, trains=False)
    check_template(config, tokenizer, findings)
    for name in sorted({name for found, _ in scans for name in found.graders}):
        findings.attempt(lambda n=name: check_grader(n))
    if shape is not None:
        check_lengths(config, shape, scans, tokenizer, findings)
    device: Device | None = findings.attempt(lambda: resolve_device(config))
    if device is not None:
        kind: EngineKind | None = findings.attempt(lambda: resolve_engine(config, device))
        check_sglang(config, kind or "embedded", findings)
    check_places(config, False, findings)
    findings.raise_problems()
