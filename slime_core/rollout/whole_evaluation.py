"""Evaluations by a whole rollout function, called once for each weight version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_core.errors import PluginError, RewardError
from slime_core.refs import Ref, is_finite
from slime_core.rollout.evaluation import Evaluator
from slime_core.rollout.handed_out import HandedOut
from slime_core.rollout.outcome import columns, unstorable
from slime_core.rollout.runtime import Runtime
from slime_core.rollout.settings import EvalJob
from slime_core.rollout.slime_rollout import EVALUATE
from slime_core.rollout.whole import WholeRollout
from slime_core.sample import Sample, Status
from slime_core.store.documents import Owner

log = logging.getLogger(__name__)


@dataclass
class WholeEvaluation:
    """Evaluates with a function: `fn(args, rollout_id, data_source, evaluation=True)`.

    Attributes:
        evaluator: our own evaluation, which the function may call and whose datasets it answers.
    """

    rollout: WholeRollout
    evaluator: Evaluator
    _last: tuple[str, dict[str, Any], dict[str, float]] | None = field(default=None, init=False)

    async def run(self, runtime: Runtime, args: Any, owner: Owner | None, job: EvalJob) -> Ref:
        """Stores the function's result for one dataset.

        Raises:
            RewardError: the function raised, or its result lacks the dataset; the evaluation
                counts as missed then.
        """
        try:
            data, metrics = await self._results(runtime, args, job)
            groups = _groups(data, job.dataset, self.rollout.path)
        except PluginError as error:
            raise RewardError(str(error)) from error
        return await self.evaluator.store(owner, job, groups, [], metrics)

    async def _results(
        self, runtime: Runtime, args: Any, job: EvalJob
    ) -> tuple[dict[str, Any], dict[str, float]]:
        if self._last is not None and self._last[0] == job.version:
            return self._last[1], {}

        own = runtime.apart(evaluation=True)

        async def ours() -> dict[str, Any]:
            return {
                dataset.name: columns(await self._answers(dataset, job, own.stopping))
                for dataset in self.evaluator.datasets
            }

        own.notes[EVALUATE] = ours
        nothing = HandedOut([], {}, {}, _no_draws)
        found = await self.rollout.call(own, args, job.iteration, nothing, evaluation=True)
        data = getattr(found, "data", found)
        if not isinstance(data, Mapping):
            raise PluginError(
                f"{self.rollout.path} returned {found!r:.60} for an evaluation; a "
                "RolloutFnEvalOutput or a dict of datasets is needed"
            )
        more = sorted(set(data) - {dataset.name for dataset in self.evaluator.datasets})
        if more:
            log.warning("%s evaluated %s, which no configured dataset is called: left out",
                        self.rollout.path, ", ".join(more))  # fmt: skip
        metrics = _metrics(getattr(found, "metrics", None), self.rollout.path)
        self._last = (job.version, dict(data), metrics)
        return self._last[1], metrics

    async def _answers(
        self, dataset: Any, job: EvalJob, stopping: Callable[[], bool]
    ) -> list[Sample]:
        own = EvalJob(job.iteration, job.version, dataset.name)
        groups, failures = await self.evaluator.answered(dataset, own, stopping)
        if failures:
            log.warning("evaluation %s: %d answers could not be graded: %s", dataset.name,
                        len(failures), failures[0])  # fmt: skip
        return [sample for group in groups for sample in group]


def _groups(data: Mapping[str, Any], name: str, path: str) -> list[list[Sample]]:
    """The samples of a dataset's result by prompt, each with its reward.

    Raises:
        PluginError: the dataset is missing, or its columns do not fit together.
    """
    if name not in data:
        raise PluginError(
            f"{path} gave no result for the dataset {name!r}, only for {', '.join(data) or 'none'}"
        )
    result = data[name]
    if not isinstance(result, Mapping) or "rewards" not in result:
        raise PluginError(f"{path}: the result of {name!r} needs rewards, truncated and samples")
    rewards = list(result["rewards"])
    samples = list(result.get("samples") or [Sample() for _ in rewards])
    truncated = list(result.get("truncated") or [False] * len(rewards))
    if not len(rewards) == len(samples) == len(truncated):
        raise PluginError(f"{path}: rewards, truncated and samples of {name!r} differ in length")
    groups: dict[Any, list[Sample]] = {}
    for place, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        if not isinstance(sample.reward, dict) or reward not in sample.reward.values():
            sample.reward = reward  # what the function says it is worth
        if truncated[place]:
            sample.status = Status.TRUNCATED
        elif sample.status is Status.PENDING:
            sample.status = Status.COMPLETED
        mark = ("own", place) if sample.group_index is None else sample.group_index
        groups.setdefault(mark, []).append(sample)
    if problem := unstorable(samples):
        raise PluginError(f"{path} left rows of {name!r} that cannot be stored: {problem}")
    return list(groups.values())


def _metrics(given: Any, path: str) -> dict[str, float]:
    """Further metrics of the function; they stand with the first dataset.

    Raises:
        PluginError: one is no finite number.
    """
    found = {}
    for name, value in (given or {}).items():
        if not isinstance(value, (bool, int, float)) or not is_finite(float(value)):
            raise PluginError(f"{path}: the metric {name!r} is {value!r:.60}, no finite number")
        found[str(name).removeprefix("eval/")] = float(value)
    return found


def _no_draws(count: int) -> Any:
    raise PluginError("an evaluation draws no prompts of the training; it has its own datasets")
