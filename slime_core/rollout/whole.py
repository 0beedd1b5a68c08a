"""Whole rollout functions: `generate_rollout(args, rollout_id, data_source, evaluation=False)`.

Such a function takes the place of our loop. What it draws is logged before it sees it, what it
returns is stored and sealed like our own groups, what it gives back comes first in the next
iteration, and what it neither returns nor gives back is stored as dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from slime_core.errors import PluginError, RewardError, SlimeError
from slime_core.plugins.load import check_signature, is_async, load, source_digest
from slime_core.plugins.threads import in_thread
from slime_core.plugins.user_code import no_exit, raised
from slime_core.refs import digest_of, is_finite
from slime_core.rollout.custom import complete
from slime_core.rollout.group_notes import answers_of, drop_of
from slime_core.rollout.handed_out import Group, HandedOut, grouped
from slime_core.rollout.outcome import refuse_misshapen, unstorable
from slime_core.rollout.part_writer import PartWriter
from slime_core.rollout.runtime import Runtime
from slime_core.rollout.scoring import Scorer
from slime_core.sample import Sample, Status
from slime_core.store.draws import Draw
from slime_core.store.parts import ABORTED, DROPPED, KEPT, GroupRows
from slime_core.waits import within

log = logging.getLogger(__name__)
DUMPS = "slime_core.rollout.dumps.generate_rollout"
OURS = "slime.rollout.sglang_rollout.generate_rollout"
ONLY_TRAINING = (
    OURS,
    DUMPS,
    "slime.rollout.sft_rollout.generate_rollout",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
)
"""Functions of slime that cannot evaluate themselves, or need not."""
FRUITLESS_S = 60.0
"""How long a function may draw nothing after a thread of its call before was refused draws."""
CALL = ("args", "rollout_id", "data_source", "evaluation=")


def training_path(path: str | None, dumps: str | None = None) -> str | None:
    """The function that makes batches; None for our loop.

    Args:
        path: what is configured.
        dumps: files that samples are read from instead (load_debug_rollout_data).
    """
    if dumps is not None:
        return DUMPS
    return None if path == OURS else path


def evaluation_path(path: str | None, training: str | None) -> str | None:
    """The function that evaluates; None for our evaluation."""
    chosen = path or training
    return None if chosen in ONLY_TRAINING else chosen


def load_rollout(path: str) -> Any:
    """The function of a path.

    Raises:
        PluginError: it cannot be loaded, or called as `fn(args, rollout_id, data_source,
            evaluation=)`.
    """
    function = load(path, ("generate_rollout",))
    check_signature(function, path, CALL)
    return function


@dataclass(frozen=True)
class WholeRollout:
    """A loaded function.

    Attributes:
        path: how the user named it.
        limit_s: how long one call may take.
    """

    path: str
    function: Any
    limit_s: float

    @classmethod
    def load(cls, path: str, limit_s: float) -> WholeRollout:
        return cls(path, load_rollout(path), limit_s)

    @property
    def digest(self) -> str:
        """Stands as the grader of rewards that it sets."""
        return digest_of(["rollout", self.path, source_digest(self.function)])

    async def call(
        self, runtime: Runtime, args: Any, number: int, source: Any, *, evaluation: bool
    ) -> Any:
        """What the function returns; a plain one runs in a thread.

        Raises:
            PluginError: it raised.
            DeadlineError: it took longer than its limit.
        """
        name = f"{self.path} of iteration {number}"
        with runtime.active(), runtime.shared(lasting=not evaluation):
            try:
                call = partial(self.function, args, number, source, evaluation=evaluation)
                return await within(name, self.limit_s, self._called(call))
            except BaseException as error:
                runtime.abort.asked = True  # for what it left running, its own thread too
                if isinstance(error, SlimeError) or not isinstance(error, Exception):
                    raise
                log.exception("%s failed", name)
                raise PluginError(f"{self.path} raised {raised(error)}") from error

    async def _called(self, call: Callable[[], Any]) -> Any:
        with no_exit(self.path):
            return await (call() if is_async(self.function) else in_thread(self.path, call))


@dataclass
class WholeSegment:
    """One segment made by a function.

    Attributes:
        segment: its number.
        target: groups that must be returned.
        source: what the function draws from.
        claim: logs groups that it made without drawing them.
        writer: stores groups.
        before: what the call before drew from.
    """

    rollout: WholeRollout
    segment: int
    target: int
    source: HandedOut
    scorer: Scorer
    writer: PartWriter
    claim: Callable[[Sequence[Group]], list[Draw]]
    before: HandedOut | None = None

    async def run(self, runtime: Runtime, args: Any) -> dict[str, float]:
        """Calls the function and stores what became of every group; returns its metrics.

        Raises:
            PluginError: it returned what cannot be trained.
            RewardError: so many of its groups could not be graded that too few are left.
        """
        call = asyncio.ensure_future(
            self.rollout.call(runtime, args, self.segment, self.source, evaluation=False)
        )
        try:
            while not call.done():
                await asyncio.wait({call}, timeout=FRUITLESS_S)
                if not call.done():
                    self._refuse_fruitless()
            found = call.result()
        finally:
            call.cancel()
            name = f"the last draw of {self.rollout.path}"
            await within(name, self.rollout.limit_s, asyncio.to_thread(self.source.close))
            await asyncio.gather(call, return_exceptions=True)
        groups, metrics = returned_groups(found, self.target, self.rollout.path)
        rows = await asyncio.to_thread(self._numbered, groups)
        kept = [await self._kept(runtime, one) for one in rows]
        rest = self._others(runtime, {one.group_id for one in rows})
        await asyncio.gather(*(self.writer.put(one) for one in [*kept, *rest]))
        dropped = [one for one in kept if one.verdict != KEPT]
        if dropped:
            raise RewardError(
                f"{len(dropped)} of the {self.target} groups that {self.rollout.path} returned "
                f"cannot be trained: {dropped[0].reason} (rollout-0.log says more)"
            )
        return metrics

    def _refuse_fruitless(self) -> None:
        """Raises PluginError where the function waits for a thread of its call before."""
        if self.before is not None and self.before.late and not self.source.out:
            raise PluginError(
                f"{self.rollout.path} has drawn nothing for {FRUITLESS_S:g} s; {self.before.late}"
            )

    def _numbered(self, groups: list[Group]) -> list[GroupRows]:
        """Groups by the draws they come from; others are logged as draws now."""
        ours: list[tuple[Draw, Group]] = []
        foreign: list[Group] = []
        taken: set[int] = set()
        for group in groups:
            numbers = {sample.group_index for sample in group}
            number = numbers.pop() if len(numbers) == 1 else None
            if number is not None and number in self.source.out and number not in taken:
                taken.add(number)
                ours.append((self.source.out[number], group))
            else:
                foreign.append(group)
        if foreign:
            draws = self.claim([_blank(group) for group in foreign])
            ours += list(zip(draws, foreign, strict=True))
        return [self._rows(draw, group) for draw, group in ours]

    def _rows(self, draw: Draw, group: Group) -> GroupRows:
        attempt = self.source.attempt_of(draw.group_id)
        first = draw.samples[0].index or 0
        ids = {sample.index for sample in draw.samples}
        rollouts: dict[Any, int] = {}
        for place, row in enumerate(group):
            mark = ("own", place) if row.rollout_id is None else row.rollout_id
            rollout = rollouts.setdefault(mark, len(rollouts))
            row.group_index, row.attempt = draw.group_id, attempt
            if row.index not in ids:
                row.index = first + rollout
            if row.rollout_id is not None:
                row.rollout_id = first + rollout
        return GroupRows(draw.group_id, attempt, draw.data_epoch, draw.position, group)

    async def _kept(self, runtime: Runtime, rows: GroupRows) -> GroupRows:
        group = list(rows.samples)
        for row in group:
            if row.status is Status.ABORTED:
                raise PluginError(
                    f"{self.rollout.path} returned {row.describe()} aborted; give its group back "
                    "with data_source.add_samples"
                )
            complete(row, runtime, self.rollout.path)
            refuse_misshapen(row, runtime.vocab_size, self.rollout.path)
        with runtime.active():
            scored = await self.scorer.score(group, self.rollout.digest)
        if problem := unstorable(group):
            raise PluginError(f"{self.rollout.path} left rows that cannot be stored: {problem}")
        verdict = KEPT if scored.drop is None else DROPPED
        return GroupRows(
            rows.group_id, rows.attempt, rows.data_epoch, rows.position, group,
            verdict=verdict, reason=scored.drop, grader_digest=list(scored.graders),
        )  # fmt: skip

    def _others(self, runtime: Runtime, returned: set[int]) -> list[GroupRows]:
        """What was drawn and not returned: prefixes of what came back, and dropped groups."""
        found = []
        for number, draw in self.source.out.items():
            if number in returned:
                continue
            attempt = self.source.attempt_of(number)
            back = self.source.back.get(number)
            place = (number, attempt, draw.data_epoch, draw.position)
            if back is None:
                found.append(self._dropped(runtime, draw))
            elif any(sample.response_length for sample in back) and not unstorable(back):
                for sample in back:
                    sample.group_index, sample.attempt = number, attempt
                    sample.status = Status.ABORTED
                found.append(GroupRows(*place, back, verdict=ABORTED))
        return found

    def _dropped(self, runtime: Runtime, draw: Draw) -> GroupRows:
        """A group that came to nothing, with what is known of its answers and of the reason."""
        known = answers_of(runtime, draw.group_id) or self.source.given[draw.group_id]
        answered = any(row.response_length for row in known) and not unstorable(known)
        rows = self._rows(draw, list(known) if answered else list(draw.samples))
        reason = drop_of(runtime, draw.group_id) or "rollout_function"
        return replace(rows, verdict=DROPPED, reason=reason)


def returned_groups(found: Any, target: int, path: str) -> tuple[list[Group], dict[str, float]]:
    """The groups and metrics of a RolloutFnTrainOutput, or of a plain list of groups.

    Raises:
        PluginError: it is neither, or holds more or fewer than `target` groups.
    """
    given = getattr(found, "samples", found)
    if not isinstance(given, (list, tuple)):
        raise PluginError(
            f"{path} returned {found!r:.60}; a RolloutFnTrainOutput or a list of groups is needed"
        )
    groups = grouped(given)
    if len(groups) != target:
        raise PluginError(
            f"{path} returned {len(groups)} groups, rollout_batch_size is {target}; give surplus "
            "groups back with data_source.add_samples"
        )
    return groups, named_metrics(getattr(found, "metrics", None), path)


def named_metrics(given: Any, path: str) -> dict[str, float]:
    """Metrics that a function returned, under `rollout/`.

    Raises:
        PluginError: one is no finite number.
    """
    found = {}
    for name, value in (given or {}).items():
        number = value.item() if hasattr(value, "item") else value
        if not isinstance(number, (bool, int, float)) or not is_finite(float(number)):
            raise PluginError(f"{path}: the metric {name!r} is {value!r:.60}, no finite number")
        name = str(name)
        found[name if name.startswith("rollout/") else f"rollout/{name}"] = float(number)
    return found


def _blank(group: Group) -> Group:
    """The prompts of a group that was not drawn, one sample a rollout."""
    heads: dict[Any, Sample] = {}
    for place, row in enumerate(group):
        heads.setdefault(("own", place) if row.rollout_id is None else row.rollout_id, row)
    return [
        Sample(
            prompt=row.prompt,
            tokens=list(row.tokens[: row.prompt_length]),
            label=row.label,
            multimodal_inputs=row.multimodal_inputs,
            apply_chat_template_kwargs=row.apply_chat_template_kwargs,
            generate_function_path=row.generate_function_path,
            custom_rm_path=row.custom_rm_path,
            metadata={"rm_type": row.metadata["rm_type"]} if "rm_type" in row.metadata else {},
        )
        for row in heads.values()
    ]
