"""Answers and scores evaluation datasets with the served weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_core.config.tree import RunConfig
from slime_core.data.sources import PromptSource, SourceSettings
from slime_core.errors import ConfigError, EngineError, RewardError
from slime_core.evaluation.datasets import EvalDataset
from slime_core.evaluation.passk import pass_curve
from slime_core.evaluation.resolve import eval_datasets
from slime_core.refs import Ref
from slime_core.rewards.hub import RewardHub
from slime_core.rewards.result import ScoreFailure
from slime_core.rollout.gate import EngineGate
from slime_core.rollout.generate import Sampling, decode_response, generate, tokenize_prompt
from slime_core.rollout.settings import EvalJob
from slime_core.run.follower import Follower
from slime_core.sample import Sample, Status
from slime_core.seeds import derive_seed
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.documents import put_document
from slime_core.store.evals import put_eval_rows
from slime_core.waits import together

log = logging.getLogger(__name__)
SAMPLES_PER_REQUEST = 64


class Evaluator:
    """Runs evaluation jobs in a rollout worker. Datasets are opened once.

    Args:
        backend: the run's store.
        tokenizer: the model's.
        gate: to the engines.
        hub: grades samples.
    """

    def __init__(
        self, config: RunConfig, backend: Backend, tokenizer: Any, gate: EngineGate, hub: RewardHub
    ) -> None:
        self._config = config
        self._backend = backend
        self._tokenizer = tokenizer
        self._gate = gate
        self._hub = hub
        self._datasets = {dataset.name: dataset for dataset in eval_datasets(config)}
        self._sources: dict[str, PromptSource] = {}

    def open_all(self) -> None:
        """Opens every dataset, so that a bad file is found before anything is trained."""
        for dataset in self._datasets.values():
            self._sources[dataset.name] = self._open(dataset)

    async def run(self, owner: Follower, job: EvalJob) -> Ref:
        """Evaluates one dataset; the first stored result of a version stays.

        Raises:
            EngineError: an answer came from another weight version, or a prompt was refused.
            RewardError: no prompt could be graded.
        """
        dataset = self._datasets[job.dataset]
        groups = _one_pass(self._sources[dataset.name])
        samples = [sample for group in groups for sample in group]
        await self._answer(dataset, job, samples)
        failures = await self._grade(samples)
        key = layout.evaluation(job.version, dataset.name)
        graded = [group for group in groups if all(s.reward is not None for s in group)]
        if not graded:
            raise RewardError(
                f"evaluation {dataset.name}: no prompt could be graded: {failures[0]}"
            )
        metrics = eval_metrics(graded, self._config.rewards.reward_key)
        if failures:
            log.warning("evaluation %s: %d answers could not be graded and their prompts do not "
                        "count: %s", dataset.name, len(failures), failures[0])  # fmt: skip
            metrics["grader_failures"] = float(len(failures))
        body = {
            "dataset": dataset.name,
            "version": job.version,
            "iteration": job.iteration,
            "metrics": metrics,
        }
        rows = layout.evaluation(job.version, dataset.name, "arrow")
        await asyncio.to_thread(put_eval_rows, self._backend, rows, samples)
        document = await asyncio.to_thread(
            lambda: put_document(self._backend, key, body, owner=owner, keep_first=True)
        )
        tokens = sum(sample.response_length for sample in samples)
        return Ref(key, "eval", job.iteration, len(samples), tokens, document.digest,
                   document.found)  # fmt: skip

    async def _answer(self, dataset: EvalDataset, job: EvalJob, samples: list[Sample]) -> None:
        sampling = self._sampling(dataset)

        def seed_of(sample: Sample) -> int:
            return derive_seed(
                self._config.run.seed, "eval", dataset.name, job.iteration,
                sample.index or 0, sample.response_length,
            )  # fmt: skip

        for sample in samples:
            tokenize_prompt(sample, self._tokenizer)
        size = SAMPLES_PER_REQUEST
        await together(
            generate(samples[i : i + size], self._gate, sampling, seed_of)
            for i in range(0, len(samples), size)
        )
        served = {version for sample in samples for version in sample.weight_versions}
        if served - {job.version}:
            raise EngineError(
                f"evaluation {dataset.name} of {job.version} was answered by {sorted(served)}"
            )

    async def _grade(self, samples: Sequence[Sample]) -> list[str]:
        """Sets rewards; returns why some could not be given."""
        skip = self._config.rollout.rollout_skip_special_tokens
        for sample in samples:
            decode_response(sample, self._tokenizer, skip)
        results = await self._hub.score_group(samples, evaluation=True)
        failures = []
        for sample, result in zip(samples, results, strict=True):
            if isinstance(result, ScoreFailure):
                failures.append(f"{result.reason}: {result.message}")
            else:
                sample.reward = result.value
        return failures

    def _sampling(self, dataset: EvalDataset) -> Sampling:
        params = {
            "temperature": dataset.temperature,
            "top_p": dataset.top_p,
            "top_k": dataset.top_k,
            "stop": dataset.stop or None,
            "stop_token_ids": dataset.stop_token_ids or None,
            "min_new_tokens": dataset.min_new_tokens,
            "repetition_penalty": dataset.repetition_penalty,
            "skip_special_tokens": bool(dataset.skip_special_tokens),
            "no_stop_trim": dataset.no_stop_trim is not False,
            "spaces_between_special_tokens": False,
        }
        given = {name: value for name, value in params.items() if value is not None}
        if dataset.max_response_len is None:
            raise ConfigError(f"eval dataset {dataset.name!r} needs max_response_len")
        timeout_s = self._config.fault_tolerance.request_timeout_s
        return Sampling(dataset.max_response_len, given, timeout_s)

    def _open(self, dataset: EvalDataset) -> PromptSource:
        settings = SourceSettings(
            input_key=dataset.input_key,
            label_key=dataset.label_key,
            metadata_key=dataset.metadata_key,
            tool_key=dataset.tool_key,
            apply_chat_template=dataset.apply_chat_template,
            apply_chat_template_kwargs=dataset.apply_chat_template_kwargs,
            n_samples_per_prompt=dataset.n_samples_per_eval_prompt,
            rollout_max_prompt_len=dataset.max_prompt_len,
            max_bad_rows=self._config.data.max_bad_rows,
        )
        return PromptSource(dataset.path, settings, self._tokenizer)


def _one_pass(source: PromptSource) -> list[list[Sample]]:
    """All groups of a dataset, in file order."""
    return [source.group_of(0, position, position) for position in range(len(source))]


def eval_metrics(groups: Sequence[Sequence[Sample]], reward_key: str | None) -> dict[str, float]:
    """reward (mean), pass@k of reward == 1, lengths and the truncated ratio."""
    samples = [sample for group in groups for sample in group]
    rewards = [_value(sample, reward_key) for sample in samples]
    lengths = [sample.response_length for sample in samples]
    curve = pass_curve([[_value(s, reward_key) == 1 for s in group] for group in groups])
    truncated = sum(sample.status is Status.TRUNCATED for sample in samples)
    return {
        "reward": float(np.mean(rewards)),
        "response_len/mean": float(np.mean(lengths)),
        "response_len/max": float(np.max(lengths)),
        "truncated_ratio": truncated / len(samples),
        "samples": float(len(samples)),
        **{f"pass@{k}": value for k, value in curve.items()},
    }


def _value(sample: Sample, reward_key: str | None) -> float:
    reward = sample.reward[reward_key] if isinstance(sample.reward, dict) and reward_key else (
        sample.reward
    )  # fmt: skip
    if not isinstance(reward, (int, float)):
        raise RewardError(f"{sample.describe()} has no reward that is a number: {reward!r}")
    return float(reward)
