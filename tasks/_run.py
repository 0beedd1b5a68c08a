"""What a task does around its stage: the run's context, a deadline with a name, one log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slime_core.refs import Ref
from slime_core.waits import within

if TYPE_CHECKING:
    from slime_core.run.context import RunContext
    from slime_core.run.pause import Patience
    from slime_core.run.recover import Recovery

log = logging.getLogger(__name__)
T = TypeVar("T")


class Report(Protocol):
    """Where progress is shown; `slime_core.report.terminal.Terminal` is one."""

    def say(self, text: str) -> None: ...
    def up(self, part: str) -> None: ...
    def stage(self, name: str, iteration: int) -> None: ...
    def start(self) -> None: ...
    def iteration(self, k: int, metrics: dict[str, float]) -> None: ...
    def evaluation(self, metrics: dict[str, float]) -> None: ...


@dataclass(frozen=True)
class Stages:
    """The stages, each `async (context, ...) -> Ref`, and what else the order needs."""

    recover: Callable[..., Awaitable[Recovery]]
    sample: Callable[..., Awaitable[Ref]]
    generate: Callable[..., Awaitable[Ref]]
    reward: Callable[..., Awaitable[Ref]]
    pack: Callable[..., Awaitable[Ref]]
    train: Callable[..., Awaitable[Ref]]
    sync: Callable[..., Awaitable[Ref]]
    evaluate: Callable[..., Awaitable[Ref | None]]
    due_evaluation: Callable[[Any, int], bool]

    @classmethod
    def real(cls) -> Stages:
        """The stages of slime_core."""
        from slime_core.run.recover import recover
        from slime_core.stages import evaluate, generate, pack, reward, sample, sync, train

        return cls(
            recover=recover,
            sample=sample.sample,
            generate=generate.generate,
            reward=reward.reward,
            pack=pack.pack,
            train=train.train,
            sync=sync.sync,
            evaluate=evaluate.evaluate,
            due_evaluation=evaluate.due_evaluation,
        )


@dataclass(frozen=True)
class Bound:
    """What the parent flow binds for its subflows and tasks; none of it is a parameter.

    Attributes:
        stop_asked: whether somebody wants the run to stop between two iterations.
        patience: waits where the store is away; without it the run ends then.
    """

    context: RunContext
    stages: Stages
    report: Report
    stop_asked: Callable[[], bool] = lambda: False
    patience: Patience | None = None


BOUND: ContextVar[Bound] = ContextVar("slime_bound")


def bound() -> Bound:
    """The binding of the current run.

    Raises:
        RuntimeError: called outside of a run, for example a task started by hand.
    """
    try:
        return BOUND.get()
    except LookupError:
        raise RuntimeError("no run is bound here: stages run inside of a training") from None


def stage_name(name: str, iteration: int) -> str:
    """`generate 000012`; what happens before the first iteration is called initial."""
    return f"{name} {iteration:06d}" if iteration >= 0 else f"{name} initial"


async def run_stage(name: str, iteration: int, *arguments: Any) -> Any:
    """Calls a stage within its deadline, again after a pause where the store was away.

    Args:
        name: a field of Stages.
        iteration: the iteration it works on, for the name of the wait.
        arguments: what the stage takes after the context.

    Raises:
        DeadlineError: the stage ran past `stage_timeout_s`.
        AwayError: the store was away for too long.
    """
    run = bound()
    stage = getattr(run.stages, name)
    limit_s = run.context.config.fault_tolerance.stage_timeout_s
    run.report.stage(name, iteration)
    started = time.monotonic()
    title = stage_name(name, iteration)
    ref = await patiently(title, lambda: within(title, limit_s, stage(run.context, *arguments)))
    log.info("%s", _line(title, ref, time.monotonic() - started))
    return ref


async def patiently(title: str, work: Callable[[], Awaitable[T]]) -> T:
    """The result of work that may be done again, after pauses where the store was away."""
    patience = bound().patience
    return await (work() if patience is None else patience.bear(title, work))


def _line(title: str, ref: Ref | None, seconds: float) -> str:
    if ref is None:
        return f"{title}: nothing to do"
    sizes = f", {ref.rows} rows, {ref.tokens} tokens" if ref.rows else ""
    origin = " from the store" if ref.from_store else ""
    return f"{title}: {ref.uri}{origin}{sizes}, {seconds:.2f} s"
