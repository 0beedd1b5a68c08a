"""Answers and scores evaluation datasets with the served weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np

from slime_core.config.tree import RunConfig
from slime_core.data.sources import PromptSource, SourceSettings
from slime_core.errors import ConfigError, EngineError, PluginError, RewardError
from slime_core.evaluation.datasets import EvalDataset
from slime_core.evaluation.passk import pass_curve
from slime_core.evaluation.resolve import eval_datasets
from slime_core.refs import Ref, digest_of
from slime_core.rewards.hub import RewardHub
from slime_core.rewards.result import ScoreFailure
from slime_core.rollout.custom import load_generate
from slime_core.rollout.generate import Sampling, tokenize_prompt
from slime_core.rollout.group import GroupMaker
from slime_core.rollout.log_hooks import LogHooks
from slime_core.rollout.runtime import Runtime
from slime_core.rollout.settings import EvalJob
from slime_core.sample import Sample, Status
from slime_core.seeds import derive_seed
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.documents import Owner, put_document
from slime_core.store.evals import put_eval_rows
from slime_core.store.urls import Fetched
from slime_core.tools.interface import load_tools
from slime_core.waits import together

log = logging.getLogger(__name__)
SAMPLES_PER_REQUEST = 64


class Evaluator:
    """Runs evaluation jobs in a rollout worker. Datasets are opened once.

    Args:
        backend: the run's store.
        maker: answers groups.
        runtime: engines, tokenizer and graders.
        told: functions that are told of each result.
    """

    def __init__(
        self,
        config: RunConfig,
        backend: Backend,
        maker: GroupMaker,
        runtime: Runtime,
        told: LogHooks | None = None,
    ) -> None:
        self._config = config
        self._backend = backend
        self._maker = maker
        self._runtime = runtime
        self._told = told
        self._tokenizer = runtime.tokenizer
        self._datasets = {dataset.name: dataset for dataset in eval_datasets(config)}
        self._sources: dict[str, PromptSource] = {}
        self._hubs: dict[str, RewardHub] = {}

    def open_all(self) -> None:
        """Opens every dataset, its grader and its generate function, so that what is wrong with
        them is found before anything is trained."""
        for dataset in self._datasets.values():
            self._sources[dataset.name] = self._open(dataset)
            self._hubs[dataset.name] = self._hub_of(dataset)
            if dataset.custom_generate_function_path:
                load_generate(dataset.custom_generate_function_path)

    def settings_digest(self, name: str) -> str:
        """Digest (hex) of what a dataset's result depends on besides the weights: its prompts,
        how they are asked and what is read from a reward. Paths do not count."""
        given = asdict(self._datasets[name])
        del given["path"], given["name"]
        config = self._config
        return digest_of(
            {
                **given,
                "prompts": self._sources[name].fingerprint,
                "seed": config.run.seed,
                "reward_key": config.eval.eval_reward_key or config.rewards.reward_key,
                "context": config.rollout.rollout_max_context_len,
                "function": config.eval.eval_function_path or config.rollout.rollout_function_path,
            }
        )

    async def run(self, owner: Owner | None, job: EvalJob) -> Ref:
        """Evaluates one dataset; the first stored result of a version stays.

        Args:
            owner: of the run, who guards what is stored; None outside of a run.

        Raises:
            RewardError: a plug-in failed, or no prompt could be graded; the evaluation counts as
                missed then.
            EngineError: see `answered`.
        """
        dataset = self._datasets[job.dataset]
        try:
            groups, failures = await self.answered(dataset, job)
        except PluginError as error:
            raise RewardError(str(error)) from error
        return await self.store(owner, job, groups, failures)

    @property
    def datasets(self) -> list[EvalDataset]:
        return list(self._datasets.values())

    async def answered(
        self, dataset: EvalDataset, job: EvalJob, stopping: Callable[[], bool] = lambda: False
    ) -> tuple[list[list[Sample]], list[str]]:
        """The graded answers to a dataset, and why some could not be graded.

        Args:
            stopping: says when nobody wants them any more.

        Raises:
            EngineError: an answer came from another weight version, or a prompt was refused.
            PluginError: a generate function failed.
            RewardError: it was stopped, by a generate function or since nobody wants it.
        """
        groups = await self._answer(dataset, job, _one_pass(self._sources[dataset.name]), stopping)
        samples = [sample for group in groups for sample in group]
        return groups, await self._grade(dataset, samples)

    async def store(
        self,
        owner: Owner | None,
        job: EvalJob,
        groups: list[list[Sample]],
        failures: list[str],
        more: dict[str, float] | None = None,
    ) -> Ref:
        """Stores what an evaluation gave; the first result of a version stays.

        Args:
            more: further metrics of it.

        Raises:
            RewardError: no prompt could be graded.
        """
        dataset = self._datasets[job.dataset]
        samples = [sample for group in groups for sample in group]
        key = layout.evaluation(job.version, dataset.name)
        graded = [group for group in groups if all(s.reward is not None for s in group)]
        if not graded:
            raise RewardError(
                f"evaluation {dataset.name}: no prompt could be graded: {failures[0]}"
            )
        key_of = self._config.eval.eval_reward_key or self._config.rewards.reward_key
        metrics = eval_metrics(graded, key_of) | (more or {})
        if failures:
            log.warning("evaluation %s: %d answers could not be graded and their prompts do not "
                        "count: %s", dataset.name, len(failures), failures[0])  # fmt: skip
            metrics["grader_failures"] = float(len(failures))
        body = {
            "dataset": dataset.name,
            "version": job.version,
            "iteration": job.iteration,
            "settings": self.settings_digest(dataset.name),
            "metrics": metrics,
        }
        rows = layout.evaluation(job.version, dataset.name, "arrow")
        await asyncio.to_thread(put_eval_rows, self._backend, rows, samples)
        document = await asyncio.to_thread(
            lambda: put_document(self._backend, key, body, owner=owner, keep_first=True)
        )
        if self._told is not None:
            await self._told.evaluation(dataset.name, job.iteration, samples, metrics)
        tokens = sum(sample.response_length for sample in samples)
        return Ref(key, "eval", job.iteration, len(samples), tokens, document.digest,
                   document.found)  # fmt: skip

    async def _answer(
        self,
        dataset: EvalDataset,
        job: EvalJob,
        groups: list[list[Sample]],
        stopping: Callable[[], bool],
    ) -> list[list[Sample]]:
        def seed_of(sample: Sample) -> int:
            return derive_seed(
                self._config.run.seed, "eval", dataset.name, job.iteration,
                sample.index or 0, sample.response_length,
            )  # fmt: skip

        for sample in (one for group in groups for one in group):
            chat = dataset.custom_generate_function_path is not None
            tokenize_prompt(sample, self._tokenizer, chat=chat)
            sample.metadata |= dict(dataset.metadata_overrides)

        def runtime() -> Runtime:
            made = self._runtime.apart(
                stopping=stopping, sampling=self._sampling(dataset), seed_of=seed_of,
                hub=self._hubs[dataset.name], evaluation=True,
            )  # fmt: skip
            rollouts.append(made)
            return made

        rollouts: list[Runtime] = []
        path = dataset.custom_generate_function_path
        if path:
            answered = await together(
                self._maker.answer(runtime(), group, job.iteration, path) for group in groups
            )
        else:
            samples = [sample for group in groups for sample in group]
            size = SAMPLES_PER_REQUEST
            await together(
                self._maker.answer(runtime(), samples[i : i + size], job.iteration, None)
                for i in range(0, len(samples), size)
            )
            answered = groups
        if any(made.stopping() for made in rollouts):
            raise RewardError(
                f"evaluation {dataset.name} of {job.version} was stopped before its end"
                + (f": {path} set GenerateState.aborted" if not stopping() else "")
            )
        served = {v for group in answered for sample in group for v in sample.weight_versions}
        if served - {job.version}:
            raise EngineError(
                f"evaluation {dataset.name} of {job.version} was answered by {sorted(served)}"
            )
        return answered

    async def _grade(self, dataset: EvalDataset, samples: Sequence[Sample]) -> list[str]:
        """Sets rewards; returns why some could not be given."""
        waiting = [sample for sample in samples if sample.reward is None]
        hub = self._hubs[dataset.name]
        with self._runtime.apart(hub=hub, evaluation=True).active():
            results = await hub.score_group(waiting, evaluation=True)
        failures = []
        for sample, result in zip(waiting, results, strict=True):
            if isinstance(result, ScoreFailure):
                failures.append(f"{result.reason}: {result.message}")
            else:
                sample.reward = result.value
        return failures

    def _hub_of(self, dataset: EvalDataset) -> RewardHub:
        """The run's graders, or the dataset's own with the same worker processes."""
        rewards, own = self._config.rewards, (dataset.rm_type, dataset.custom_rm_path)
        if own == (rewards.rm_type, rewards.custom_rm_path):
            return self._runtime.hub
        return self._runtime.hub.variant(rm_type=own[0], custom_rm_path=own[1], group_rm=False)

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
        context = self._config.rollout.rollout_max_context_len
        return Sampling(dataset.max_response_len, given, timeout_s, context)

    def _open(self, dataset: EvalDataset) -> PromptSource:
        settings = SourceSettings(
            input_key=dataset.input_key,
            label_key=dataset.label_key,
            metadata_key=dataset.metadata_key,
            tool_key=dataset.tool_key,
            multimodal_keys=dataset.multimodal_keys,
            apply_chat_template=dataset.apply_chat_template,
            apply_chat_template_kwargs=dataset.apply_chat_template_kwargs,
            n_samples_per_prompt=dataset.n_samples_per_eval_prompt,
            rollout_max_prompt_len=dataset.max_prompt_len,
            max_bad_rows=self._config.data.max_bad_rows,
            default_tools=[t.schema for t in load_tools(self._config.rollout.tool_paths).values()],
        )
        return PromptSource(dataset.path, settings, self._tokenizer, Fetched())


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
        **_means_by_key(samples),
    }


def _means_by_key(samples: Sequence[Sample]) -> dict[str, float]:
    """reward/<key>: means of the entries of dict rewards that are numbers."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for key, value in sample.reward.items() if isinstance(sample.reward, dict) else ():
            if isinstance(value, (int, float)):
                values.setdefault(f"reward/{key}", []).append(float(value))
    return {key: float(np.mean(found)) for key, found in values.items()}


def _value(sample: Sample, reward_key: str | None) -> float:
    reward = sample.reward[reward_key] if isinstance(sample.reward, dict) and reward_key else (
        sample.reward
    )  # fmt: skip
    if not isinstance(reward, (int, float)):
        raise RewardError(f"{sample.describe()} has no reward that is a number: {reward!r}")
    return float(reward)
