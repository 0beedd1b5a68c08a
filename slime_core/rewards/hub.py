"""From a sample to a score: which grader counts, where it runs, and what its answer is worth."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_core.errors import ConfigError
from slime_core.plugins.load import accepts, check_signature, is_async, load, source_digest
from slime_core.plugins.user_code import raised
from slime_core.rewards.aside import AsideLoop, TimeoutAside
from slime_core.rewards.math_text import boxed_content
from slime_core.rewards.registry import BOXED, REWARD_NAMES, Grader, grader_named
from slime_core.rewards.remote import RemoteGrader, RemoteSettings
from slime_core.rewards.result import Score, ScoreFailure, ScoreResult, failed_before, to_result
from slime_core.rewards.text import strip_end_tokens
from slime_core.rewards.workers import Answer, GraderPool, PoolSettings
from slime_core.sample import Sample

log = logging.getLogger(__name__)

BATCHED_NAMES = ("batched_custom_rm", "reward_func")


@dataclass(frozen=True)
class RewardSettings:
    """How samples are graded; the names are the flags'.

    Attributes:
        rm_type: built-in grader for samples whose metadata names none.
        custom_rm_path: import path of `async fn(args, sample, **kwargs)`; wins over rm_type.
        reward_key: entry of dict rewards that is trained.
        eval_reward_key: the same in evaluation, default reward_key.
        group_rm: hand whole groups to the custom function, as `fn(args, samples)`.
        rm_url: server of `remote_rm`.
        reward_timeout_s: deadline of one grading.
        reward_workers: grader processes.
        end_tokens: stripped from the end of responses besides the well-known ones.
    """

    rm_type: str | None = None
    custom_rm_path: str | None = None
    reward_key: str | None = None
    eval_reward_key: str | None = None
    group_rm: bool = False
    rm_url: str | None = None
    reward_timeout_s: float = 60.0
    reward_workers: int = 1
    end_tokens: tuple[str, ...] = ()


class RewardHub:
    """Grades samples; one a process, used from one event loop."""

    def __init__(
        self,
        settings: RewardSettings,
        args: Any = None,
        pool: GraderPool | None = None,
        aside: AsideLoop | None = None,
    ) -> None:
        """Loads and checks what is configured, so that a wrong name fails at the start.

        Args:
            settings: how to grade.
            args: handed to custom functions as their first argument.
            pool: worker processes; by default a pool of its own.
            aside: where async functions run; by default a thread of its own.

        Raises:
            ConfigError: unknown grader, or a setting it needs is missing.
                PluginError: the custom function cannot be loaded or called so.
        """
        self.settings = settings
        self._args = args
        self._pool = pool or GraderPool(PoolSettings(workers=settings.reward_workers))
        self._owns_pool = pool is None
        self._aside = aside or AsideLoop()
        self._plain_args: dict[str, Any] | None = None
        self._digests: dict[str, str] = {}
        self._told: set[str] = set()
        self._remote = RemoteGrader(RemoteSettings(settings.rm_url or ""))
        if settings.custom_rm_path:
            function = load(settings.custom_rm_path, self._names())
            call = ("args", "samples" if settings.group_rm else "sample")
            check_signature(
                function, settings.custom_rm_path, call, must_be_async=settings.group_rm
            )
        elif settings.group_rm:
            raise ConfigError("--group-rm hands groups to a function; set --custom-rm-path")
        elif settings.rm_type:
            grader = self._check_type(settings.rm_type)
            if grader is not None:
                grader.check()

    async def close(self) -> None:
        """Ends worker processes and connections."""
        if self._owns_pool:
            await self._pool.close()
            await self._aside.close()
        await self._remote.close()

    def grader_digest(self, sample: Sample) -> str:
        """sha256 (hex) that names the code and settings grading this sample.

        Raises:
            ConfigError: no grader is configured for it.
        """
        path = sample.custom_rm_path or self.settings.custom_rm_path
        if path:
            return self._custom_digest(path)
        rm_type = self._rm_type(sample)
        name = rm_type.removeprefix(BOXED)
        if name == "remote_rm":
            base = f"remote\n{self.settings.rm_url}"
        else:
            base = grader_named(name).digest
        return hashlib.sha256(f"{rm_type}\n{base}".encode()).hexdigest()

    async def score(self, sample: Sample, *, evaluation: bool = False) -> ScoreResult:
        """Grades one sample; whatever a grader does, the answer is typed.

        Raises:
            ConfigError: no grader, or an unknown one, is named for this sample.
        """
        if failure := failed_before(sample.metadata):
            return failure
        path = sample.custom_rm_path or self.settings.custom_rm_path
        digest = self.grader_digest(sample)
        if path:
            return await self._custom(path, sample, digest, evaluation)
        rm_type = self._rm_type(sample)
        outcome = await self._built_in(rm_type, sample)
        return self._result(outcome, digest, rm_type, evaluation)

    async def score_group(
        self, samples: Sequence[Sample], *, evaluation: bool = False
    ) -> list[ScoreResult]:
        """Grades samples together, results in their order.

        With `group_rm` the custom function is called once with all of them (not in evaluation,
        where samples of a prompt are no group).
        """
        path = self.settings.custom_rm_path
        failed = [sample for sample in samples if failed_before(sample.metadata)]
        alone = any(sample.custom_rm_path not in (None, path) for sample in samples) or failed
        if self.settings.group_rm and path and samples and not evaluation and not alone:
            return await self._batched(path, list(samples))
        return list(
            await asyncio.gather(*(self.score(one, evaluation=evaluation) for one in samples))
        )

    def _custom_digest(self, path: str) -> str:
        """Of the file as it was when the function was first used; later edits do not count."""
        if path not in self._digests:
            source = source_digest(load(path, self._names()))
            named = f"custom\n{path}\n{source}".encode()
            self._digests[path] = hashlib.sha256(named).hexdigest()
        return self._digests[path]

    def variant(self, **changes: Any) -> RewardHub:
        """A hub with some settings changed and the same workers; close it before this one.

        For example `variant(rm_type="math", custom_rm_path=None)` for an evaluation dataset that
        names its own grader.
        """
        return RewardHub(replace(self.settings, **changes), self._args, self._pool, self._aside)

    def _args_for_workers(self) -> dict[str, Any]:
        """What of `args` another process can get: plain values; made once, so that calls batch."""
        if self._plain_args is None:
            values = (
                self._args if isinstance(self._args, dict) else getattr(self._args, "__dict__", {})
            )
            plain = (str, int, float, bool, list, dict, type(None))
            self._plain_args = {k: v for k, v in values.items() if isinstance(v, plain)}
        return self._plain_args

    def _names(self) -> tuple[str, ...]:
        return BATCHED_NAMES if self.settings.group_rm else REWARD_NAMES

    def _rm_type(self, sample: Sample) -> str:
        rm_type = sample.metadata.get("rm_type") or self.settings.rm_type
        if not rm_type:
            raise ConfigError(
                "no grader: set --rm-type or --custom-rm-path, or name one in metadata['rm_type']"
            )
        return str(rm_type).strip()

    def _check_type(self, rm_type: str) -> Grader | None:
        name = rm_type.removeprefix(BOXED)
        if name != "remote_rm":
            return grader_named(name)
        if not self.settings.rm_url:
            raise ConfigError("--rm-type remote_rm needs --rm-url")
        return None

    def _result(self, value: Any, digest: str, name: str, evaluation: bool) -> ScoreResult:
        if isinstance(value, ScoreFailure):
            return ScoreFailure(value.reason, value.message, digest)
        key = self.settings.reward_key
        if evaluation:  # a dataset may have another grader, and its plain numbers count as they are
            key = self.settings.eval_reward_key or key
            key = key if isinstance(value, dict) else None
        return to_result(value, digest, key, name)

    async def _built_in(self, rm_type: str, sample: Sample) -> Any:
        """The value a built-in grader returns, or a ScoreFailure."""
        grader = self._check_type(rm_type)
        response = strip_end_tokens(sample.response, self.settings.end_tokens)
        if rm_type.startswith(BOXED):
            response = boxed_content(response) or ""
        label = sample.label if sample.label is not None else sample.metadata.get("answer")
        label = label if label is None or isinstance(label, str) else str(label)
        if grader is None:
            return await self._remote.grade(
                {"prompt": sample.prompt, "response": response, "label": label},
                self.settings.reward_timeout_s,
            )
        if grader.needs_label and label is None:
            message = f"{grader.name} needs a label; set --label-key or metadata['answer']"
            return ScoreFailure("no_label", message, "")
        if len(response) <= grader.inline_chars:
            return grader.function()(response, label, sample.metadata)
        answer = await self._pool.grade(
            f"grader:{grader.name}",
            [response, label, sample.metadata],
            self.settings.reward_timeout_s,
        )
        return answer.value if not answer.reason else self._failed(answer, rm_type)

    async def _custom(
        self, path: str, sample: Sample, digest: str, evaluation: bool
    ) -> ScoreResult:
        function = load(path, self._names())
        if not is_async(function):
            answer = await self._pool.grade(
                f"custom:{path}",
                [sample.to_dict()],
                self.settings.reward_timeout_s,
                self._args_for_workers(),
            )
            value = answer.value if not answer.reason else self._failed(answer, path)
            return self._result(value, digest, path, evaluation)
        keywords = {"evaluation": evaluation} if accepts(function, "evaluation") else {}
        value = await self._awaited(path, lambda: function(self._args, sample, **keywords))
        return self._result(value, digest, path, evaluation)

    async def _batched(self, path: str, samples: list[Sample]) -> list[ScoreResult]:
        digest = self.grader_digest(samples[0])
        function = load(path, self._names())
        values = await self._awaited(path, lambda: function(self._args, samples))
        if not isinstance(values, ScoreFailure):
            values = values.tolist() if hasattr(values, "tolist") else values
            if not isinstance(values, (list, tuple)) or len(values) != len(samples):
                found = f"{len(values)} values" if hasattr(values, "__len__") else repr(values)
                message = f"{path} returned {found} for {len(samples)} samples"
                values = ScoreFailure("wrong_count", message, digest)
        if isinstance(values, ScoreFailure):
            values = [values] * len(samples)
        return [self._result(value, digest, path, False) for value in values]

    async def _awaited(self, path: str, call: Any) -> Any:
        """A custom function's value under the deadline, or a ScoreFailure."""
        limit_s = self.settings.reward_timeout_s
        try:
            return await self._aside.run(call, limit_s)
        except TimeoutAside as error:
            how = ", all that time without letting its thread go" if error.blocked else ""
            return ScoreFailure("timeout", f"{path} took more than {limit_s:g} s{how}", "")
        except Exception as error:
            message = raised(error)
            trace = "".join(traceback.format_tb(error.__traceback__))
            return self._failed(Answer(None, "exception", message, trace), path)

    def _failed(self, answer: Answer, name: str) -> ScoreFailure:
        """A worker's failure; the first time that a grader raises at some place, the log tells
        where."""
        if not answer.trace:
            return ScoreFailure(answer.reason or "", f"{name}: {answer.message}", "")
        message = f"{name} raised {answer.message}"
        if answer.trace not in self._told:
            self._told.add(answer.trace)
            log.error("%s\n%s", message, answer.trace.rstrip())
        return ScoreFailure(answer.reason or "", message, "")


def settle(sample: Sample, result: ScoreResult, on_error: str = "mask") -> bool:
    """Writes a result into its sample; says whether the sample has a reward now.

    Args:
        sample: gets `reward`, and `metadata["reward_error"]` after a failure.
        result: what the hub gave.
        on_error: what a failure costs. "mask": reward 0 and out of the loss; "zero": reward 0;
            "drop": no reward, the group cannot be trained; "fail": RewardError.

    Raises:
        RewardError: a failure under "fail".
        ConfigError: an unknown `on_error`.
    """
    if isinstance(result, Score):
        sample.reward = result.value
        return True
    if on_error not in ("mask", "zero", "drop", "fail"):
        raise ConfigError(f"reward errors are mask, zero, drop or fail, not {on_error!r}")
    if on_error == "fail":
        result.raise_error()
    sample.metadata = sample.metadata | {
        "reward_error": {"reason": result.reason, "message": result.message}
    }
    if on_error == "drop":
        return False
    sample.reward = 0.0
    sample.remove_sample = sample.remove_sample or on_error == "mask"
    return True
