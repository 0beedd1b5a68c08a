"""One attempt at a group: answers, hooks, rewards, verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.load import check_signature, is_async, load
from slime_core.plugins.user_code import no_exit, raised
from slime_core.rollout.custom import GenerateFunction, load_generate
from slime_core.rollout.filters import judge, load_filter
from slime_core.rollout.generate import OPEN_STATES, decode_response, generate
from slime_core.rollout.greedy import greedily, mark, prompt_alone
from slime_core.rollout.outcome import Outcome, dropped, refuse_misshapen, unstorable
from slime_core.rollout.runtime import Runtime
from slime_core.rollout.scoring import Scorer
from slime_core.sample import Sample, Status
from slime_core.store.parts import ABORTED, DROPPED, KEPT, SPARE

REMAX = "remax"
HOOK_CALL = ("args", "sample", "rollout_id=", "evaluation=")


class GroupMaker:
    """Answers and scores groups as configured. Loads every plug-in when it is made.

    Args:
        args: the settings under their flag names (an ArgsView).
        scorer: grades.

    Raises:
        PluginError: a function cannot be loaded or called so.
    """

    def __init__(self, args: Any, scorer: Scorer) -> None:
        self._args = args
        self._scorer = scorer
        self._generate = args.custom_generate_function_path or None
        self._functions: dict[str, GenerateFunction] = {}
        if self._generate:
            self._function(self._generate)
        load_filter(args.dynamic_sampling_filter_path)
        self._hooks = [(path, load_hook(path)) for path in args.rollout_sample_hook_path]

    async def finish(self, runtime: Runtime, samples: list[Sample], segment: int) -> Outcome:
        """Brings a group to its verdict.

        Raises:
            SlimeError: what may be tried again, or must end the run; see SegmentLoop.
        """
        rows = await self.answer(runtime, samples, segment, self._generate)
        if runtime.abort.asked:
            raise PluginError(
                "a generate function aborted the rollout (GenerateState.aborted, abort): that is "
                "for whole rollout functions; return the sample as it is instead"
            )
        if runtime.cut and runtime.stopping():
            return Outcome([], [], ABORTED)  # its function took a cut-off answer for a whole one
        if any(row.status in OPEN_STATES for row in rows):
            if not runtime.stopping():
                raise PluginError("a generate function left samples aborted that nobody stopped")
            return self._unfinished(rows)
        greedy = await self._greedy(runtime, rows[0], segment)
        if any(row.status in OPEN_STATES for row in greedy):
            return self._unfinished(rows)
        failed = [row for row in rows if row.status is Status.FAILED]
        if failed and self._args.failed_samples == "drop":
            return dropped(rows, [], "failed_samples")
        for row in failed:
            row.remove_sample = row.remove_sample or self._args.failed_samples == "mask"
        with runtime.active():
            scored = await self._scorer.score(rows, self._given(samples))
            reason = scored.drop
            if greedy and reason is None:
                reason = (await self._scorer.score(greedy, self._given(samples))).drop
        if greedy and reason is None:
            mark(rows, greedy, self._args.reward_key)
        if reason is None and self._touched and (problem := unstorable(rows)):
            raise PluginError(f"a plug-in left rows that cannot be stored: {problem}")
        if reason is not None:
            return dropped(rows, scored.graders, reason)
        return self._judged(rows, scored.graders)

    async def answer(
        self, runtime: Runtime, samples: Sequence[Sample], segment: int, path: str | None
    ) -> list[Sample]:
        """Rows with responses, hooks called; a sample's own function goes before `path`."""
        if all(sample.status not in OPEN_STATES for sample in samples):
            rows = list(samples)  # ended in an earlier segment
        else:
            rows = await self._rows(runtime, samples, path)
        skip = self._args.rollout_skip_special_tokens
        foreign = path is not None or self._touched
        for row in rows:
            row.response = "" if row.response is None else row.response
            if foreign:
                refuse_misshapen(row, runtime.vocab_size, path or "a plug-in")
            if not row.response or not (path or row.generate_function_path):
                decode_response(row, runtime.tokenizer, skip)
        if any(row.status in OPEN_STATES for row in rows):
            return rows
        return [await self._hooked(row, segment, runtime) for row in rows]

    async def _greedy(self, runtime: Runtime, row: Sample, segment: int) -> list[Sample]:
        """The greedy answer to a row's prompt, if the estimator compares with one."""
        if self._args.advantage_estimator != REMAX:
            return []
        return await self.answer(greedily(runtime), [prompt_alone(row)], segment, self._generate)

    async def _rows(
        self, runtime: Runtime, samples: Sequence[Sample], path: str | None
    ) -> list[Sample]:
        own = {sample.generate_function_path for sample in samples}
        if own == {None}:
            return await self._by(runtime, samples, path)
        rows: list[Sample] = []
        for sample in samples:
            rows += await self._by(runtime, [sample], sample.generate_function_path or path)
        return rows

    async def _by(
        self, runtime: Runtime, samples: Sequence[Sample], path: str | None
    ) -> list[Sample]:
        if path:
            return await self._function(path).run(runtime, samples)
        await generate(samples, runtime.gate, runtime.sampling, runtime.seed_of, runtime.stopping)
        return list(samples)

    async def _hooked(self, row: Sample, segment: int, runtime: Runtime) -> Sample:
        evaluation = runtime.evaluation
        for path, hook in self._hooks:
            try:
                with no_exit(path):
                    found = hook(self._args, row, rollout_id=segment, evaluation=evaluation)
                    found = await found if is_async(hook) else found
            except SlimeError:
                raise
            except Exception as error:
                raise PluginError(f"{path} raised {raised(error)}") from error
            if found is not None and not isinstance(found, Sample):
                raise PluginError(f"{path} returned {found!r:.80}; a Sample or None is needed")
            row = row if found is None else found
            refuse_misshapen(row, runtime.vocab_size, path)
        return row

    def _unfinished(self, rows: list[Sample]) -> Outcome:
        """A group that was stopped. What a generate function knew of it is gone, so it begins
        anew; plain generation goes on from its tokens."""
        if self._touched and any(row.generate_function_path or self._generate for row in rows):
            return Outcome([], [], ABORTED)
        return Outcome(rows, [], ABORTED)

    def _judged(self, rows: list[Sample], graders: Sequence[str | None]) -> Outcome:
        path = self._args.dynamic_sampling_filter_path
        if not path:
            return Outcome(rows, graders)
        verdict = judge(path, self._args, rows)
        if verdict.keep:
            return Outcome(rows, graders, KEPT)
        reason = f"dynamic_filter/{verdict.reason or 'filtered'}"
        return Outcome(rows, graders, SPARE if verdict.keep_when_insufficient else DROPPED, reason)

    @property
    def _touched(self) -> bool:
        """Foreign code had the rows in its hands."""
        return bool(
            self._functions or self._hooks or self._args.custom_rm_path
            or self._args.dynamic_sampling_filter_path
        )  # fmt: skip

    def _given(self, samples: Sequence[Sample]) -> str | None:
        path = samples[0].generate_function_path or self._generate
        return self._function(path).digest if path else None

    def _function(self, path: str) -> GenerateFunction:
        if path not in self._functions:
            self._functions[path] = load_generate(path)
        return self._functions[path]


def load_hook(path: str) -> Callable[..., Any]:
    """A hook on samples. Raises PluginError where it cannot be loaded or called so."""
    hook = load(path)
    check_signature(hook, path, HOOK_CALL)
    return hook
