"""Generate functions by import path: per sample as upstream has them, or per list as the seed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from slime_core.errors import PluginError, SlimeError
from slime_core.plugins.load import accepts, check_signature, is_async, load, source_digest
from slime_core.plugins.threads import in_thread
from slime_core.plugins.user_code import no_exit, raised
from slime_core.refs import digest_of
from slime_core.rollout.multiturn import attach_conversations
from slime_core.rollout.outcome import refuse_form
from slime_core.rollout.runtime import Runtime
from slime_core.sample import Sample, Status
from slime_core.store.parts import rollout_positions
from slime_core.waits import Patience, place, together

GENERATE_NAMES = ("custom_generate", "generate")
PER_SAMPLE = ("args", "sample", "sampling_params")
PER_LIST = ("args", "samples")
BEGUN = "response lengths at first"
"""By index, in a rollout's notes: what samples had before their function was called, which the
length limit that it is handed does not hold any more."""


@dataclass(frozen=True)
class GenerateFunction:
    """A loaded generate function.

    Attributes:
        path: how the user named it.
        per_list: it takes all samples of a group and their list comes back.
        digest: of its path and source; stands as the grader of rewards that it sets.
    """

    path: str
    function: Any
    per_list: bool
    digest: str

    @property
    def form(self) -> str:
        """How it is called, in words."""
        kind = "async def" if is_async(self.function) else "def (in threads)"
        return f"{kind}, called {'with each group' if self.per_list else 'for each sample'}"

    async def run(self, runtime: Runtime, samples: Sequence[Sample]) -> list[Sample]:
        """Rows of all samples, in their order; fan-out siblings share a rollout_id.

        Raises:
            PluginError: the function raised, or returned what cannot be used.
            DeadlineError: it took longer than its deadline.
        """
        runtime.notes["samples"] = list(samples)
        runtime.notes[BEGUN] = {sample.index: sample.response_length for sample in samples}
        lists = [sample.prompt for sample in samples if isinstance(sample.prompt, list)]
        chats = [(prompt, copy.deepcopy(prompt)) for prompt in lists]
        with runtime.active():
            try:
                rows = await self._call(runtime, samples)
            except SlimeError:
                raise
            except Exception as error:
                raise PluginError(f"{self.path} raised {raised(error)}") from error
        if len({id(row) for row in rows}) < len(rows):
            raise PluginError(f"{self.path} returned a Sample twice; copy it (copy.deepcopy)")
        attach_conversations(runtime, rows)
        for row in rows:  # a function may have grown the prompt's own list into the conversation
            row.prompt = next((old for now, old in chats if now is row.prompt), row.prompt)
            complete(row, runtime, self.path)
        rollouts = max(rollout_positions(rows)) + 1
        if rollouts != len(samples):
            raise PluginError(
                f"{self.path} returned {rollouts} rollouts for {len(samples)} samples; rows of one "
                "rollout share their rollout_id"
            )
        return rows

    async def _call(self, runtime: Runtime, samples: Sequence[Sample]) -> list[Sample]:
        if not self.per_list:
            each = await together(self._one(runtime, sample) for sample in samples)
            return [row for rows in each for row in rows]
        drawn = [copy.copy(sample) for sample in samples]
        found = await self._invoke(runtime, samples[0], list(samples))
        if not isinstance(found, (list, tuple)) or len(found) != len(samples):
            shown = len(found) if isinstance(found, (list, tuple)) else repr(found)[:80]
            raise PluginError(f"{self.path} returned {shown} for a list of {len(samples)} samples")
        places = {id(sample): place for place, sample in enumerate(samples)}
        if {id(one) for one in found} == set(places):  # the given samples in another order
            found = sorted(found, key=lambda one: places[id(one)])
        each = [self._siblings(one, sample) for one, sample in zip(found, drawn, strict=True)]
        return [row for rows in each for row in rows]

    async def _one(self, runtime: Runtime, sample: Sample) -> list[Sample]:
        params = runtime.sampling_params(sample)
        drawn = copy.copy(sample)  # functions may change the sample's numbers
        return self._siblings(await self._invoke(runtime, sample, sample, params), drawn)

    async def _invoke(self, runtime: Runtime, about: Sample, *given: Any) -> Any:
        """One call under its deadline; a plain function gets a thread of its own."""
        keywords = self._keywords(runtime)
        limit_s = runtime.sampling.timeout_s * max(1, getattr(runtime.args, "max_turns", 1))
        if getattr(runtime.args, "agent_path", None):  # has a deadline of its own
            limit_s = max(limit_s, runtime.args.stage_timeout_s)

        async def called() -> Any:
            with no_exit(self.path):
                if is_async(self.function):
                    return await self.function(runtime.args, *given, **keywords)
                call = partial(self.function, runtime.args, *given, **keywords)
                async with place(runtime.threads, f"{self.path} to begin", stage_s):
                    found = await in_thread(self.path, call)
                return await found if inspect.isawaitable(found) else found

        stage_s = getattr(runtime.args, "stage_timeout_s", limit_s)
        return await Patience(f"{self.path} for {about.describe()}", limit_s).run(called())

    def _keywords(self, runtime: Runtime) -> dict[str, bool]:
        return {"evaluation": runtime.evaluation} if accepts(self.function, "evaluation") else {}

    def _siblings(self, found: Any, sample: Sample) -> list[Sample]:
        """The rows of one rollout."""
        rows = list(found) if isinstance(found, (list, tuple)) else [found]
        if not rows or not all(isinstance(row, Sample) for row in rows):
            raise PluginError(f"{self.path} returned {found!r:.80}; a Sample or list is needed")
        for row in rows:
            row.group_index, row.attempt, row.index = (
                sample.group_index, sample.attempt, sample.index
            )  # fmt: skip
            row.label = sample.label if row.label is None else row.label
            row.prompt = row.prompt or sample.prompt
            row.metadata = dict(sample.metadata) if row.metadata in (None, {}) else row.metadata
            if isinstance(row.weight_versions, str):
                row.weight_versions = [row.weight_versions]
            if len(rows) > 1:
                row.rollout_id = sample.index
        return rows


def complete(row: Sample, runtime: Runtime, path: str) -> None:
    """Fills in what functions may leave out, and refuses what cannot be trained.

    Raises:
        PluginError: a response without tokens, or tokens that are no list.
        DataError: per-token values of another length.
    """
    refuse_form(row, path)
    if row.response and not row.response_length and row.status is not Status.FAILED:
        raise PluginError(
            f"{path}: {row.describe()} has a response without tokens; use "
            "slime_core.rollout.multiturn, or sample.append_response_tokens"
        )
    if row.status is Status.PENDING:
        row.status = Status.COMPLETED
    if not row.weight_versions and runtime.versions:
        row.weight_versions = list(dict.fromkeys(runtime.versions))
    if row.status is not Status.ABORTED and not row.response_length:
        end = getattr(runtime.tokenizer, "eos_token_id", None)
        row.append_response_tokens(tokens=[end or 0], log_probs=None, trainable=False)
    try:
        row.check_lengths()
    except (AttributeError, TypeError) as error:
        raise PluginError(f"{path} left {row.describe()} in a form of its own: {error}") from error


def load_generate(path: str) -> GenerateFunction:
    """Loads a generate function and finds out its form.

    Raises:
        PluginError: it does not exist, or fits neither form.
    """
    function = load(path, GENERATE_NAMES)
    per_list = _takes_list(function)
    call = PER_LIST if per_list else PER_SAMPLE
    if accepts(function, "evaluation"):
        call = (*call, "evaluation=")
    check_signature(function, path, call)
    digest = digest_of(["generate", path, source_digest(function)])
    return GenerateFunction(path, function, per_list, digest)


def _takes_list(function: Any) -> bool:
    """By the name of its second parameter, or since it takes no sampling parameters."""
    if not callable(function):
        return False
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:
        return False
    if len(names) < 2:
        return False
    return names[1].endswith("s") or "list" in names[1] or (
        len(names) == 3 and names[2] == "evaluation"
    )  # fmt: skip
