"""What code inside a rollout may use: engines, tokenizer, graders and settings.

Custom functions get it as `current()`; the names that slime gives them (slime_names.py) and the
multi-turn helpers are built on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from slime_core.engines.client import EngineAnswerError, EngineUnreachableError
from slime_core.errors import EngineError, PluginError
from slime_core.rewards.hub import RewardHub
from slime_core.rollout.gate import EngineGate
from slime_core.rollout.generate import SERVER_ERROR, Sampling
from slime_core.rollout.going_on import can_continue, continued, joined, was_aborted
from slime_core.sample import Sample
from slime_core.waits import Deadline, within

if TYPE_CHECKING:
    from slime_core.agents.gateway import Gateway
    from slime_core.agents.turn_log import TurnLog

T = TypeVar("T")
ABORTED_META = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [], "id": ""}


@dataclass
class Abort:
    """Whether code inside a rollout wants it to stop; all views of one rollout share it."""

    asked: bool = False


@dataclass
class Runtime:
    """One rollout, as the code inside it sees it.

    Attributes:
        args: every setting under its flag name.
        sampling: limits and sampling parameters.
        seed_of: seed of a sample's next request.
        evaluation: it evaluates and does not train.
        stopping: once it says so nothing may be generated any more; also after `abort`.
        versions: weight versions that answered so far.
        notes: what helpers keep during the rollout.
        cut: an answer was cut off, so nothing of this rollout is finished.
        home: the loop that engines and graders are reached from, None for whichever runs.
        engine_of: conversation -> URL of the engine that answered it last and holds its beginning.
        gateway: what agents talk to; None where nothing was started for them.
        turn_log: (sample, which of its sessions) -> where turns are recorded; None for nowhere.
        abort: set by a whole rollout function that has what it needs.
        singles: what there is one of in a rollout, by class.
        vocab_size: tokens that the model knows, None where that is not known.
        threads: places of plain generate functions that run at once, None for any number.
    """

    args: Any
    tokenizer: Any
    gate: EngineGate
    hub: RewardHub
    sampling: Sampling
    seed_of: Callable[[Sample], int]
    evaluation: bool = False
    stopping: Callable[[], bool] = lambda: False
    versions: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    cut: bool = False
    engine_of: dict[str, str] = field(default_factory=dict)
    gateway: Gateway | None = None
    turn_log: Callable[[Sample, int], TurnLog] | None = None
    home: asyncio.AbstractEventLoop | None = None
    abort: Abort = field(default_factory=Abort)
    singles: dict[type, Any] = field(default_factory=dict)
    vocab_size: int | None = None
    threads: asyncio.Semaphore | None = None

    def __post_init__(self) -> None:
        told, abort = self.stopping, self.abort
        self.stopping = lambda: abort.asked or told()

    def apart(self, *, stopping: Callable[[], bool] = lambda: False, **changes: Any) -> Runtime:
        """A rollout of its own with the same engines and settings: who stops or notes something
        there does not do it here.

        Args:
            stopping: says when it is to stop; this one's own `abort` does not count.
            changes: other attributes.
        """
        own: dict[str, Any] = {
            "versions": [], "notes": {}, "singles": {}, "engine_of": {}, "abort": Abort(),
            "cut": False,
        }  # fmt: skip
        return replace(self, stopping=stopping, **own | changes)

    async def at_home(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the home loop, also for a function that has a loop of its own."""
        if self.home is None or self.home is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.home))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes this the `current()` one, also of tasks started inside."""
        if self.home is None:
            self.home = asyncio.get_running_loop()
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    @contextmanager
    def shared(self, lasting: bool) -> Iterator[None]:
        """Makes this the current one also of threads that a whole rollout function starts, which
        have no context.

        Args:
            lasting: it stays so, since threads of the training's function go on between calls.
        """
        before = list(_OF_THREADS)
        _OF_THREADS[:] = [self]
        try:
            yield
        finally:
            if not lasting:
                _OF_THREADS[:] = before

    def sampling_params(self, sample: Sample) -> dict[str, Any]:
        """SGLang's parameters for a sample, its own seed and what is left of its length."""
        return {
            **self.sampling.params,
            "max_new_tokens": max(0, self.sampling.left(sample)),
            "sampling_seed": self.seed_of(sample),
        }

    async def generate(
        self, body: dict[str, Any], session: str | None = None, *, whole: bool = True
    ) -> dict[str, Any]:
        """One call of SGLang's /generate at the least busy engine, with its JSON answer.

        Args:
            session: names a conversation; it stays at its engine while that one has room.
            whole: go on with an answer that was cut off; a caller that keeps the weight version of
                each piece goes on itself.

        Raises:
            EngineError: the request was refused, or no engine answered it.
        """
        return await self.at_home(self._generate(body, session, whole))

    async def _generate(
        self, body: dict[str, Any], session: str | None, whole: bool
    ) -> dict[str, Any]:
        deadline = Deadline("a request of a generate function", self.sampling.timeout_s)
        before: dict[str, Any] | None = None
        while not self.stopping():
            deadline.check()
            last = self.engine_of.get(session) if session is not None else None
            async with self.gate.engine(1, deadline.remaining_s, prefer=last) as client:
                try:
                    asked = body if before is None else continued(body, before)
                    call = client.generate_raw(asked)
                    answer = await within(deadline.name, deadline.remaining_s, call)
                except (EngineUnreachableError, EngineAnswerError) as error:
                    if isinstance(error, EngineAnswerError) and error.status < SERVER_ERROR:
                        raise
                    await self.gate.mark_down(client, str(error))
                    continue
            if not isinstance(answer, dict):
                raise EngineError("a generate function sent a batch; send one prompt a request")
            if session is not None:
                self.engine_of[session] = client.url
            version = answer.get("meta_info", {}).get("weight_version")
            if version is not None:
                self.versions.append(str(version))
            if not whole:
                return answer
            answer = answer if before is None else joined(before, answer)
            if not was_aborted(answer) or not can_continue(body, answer):
                self.cut = self.cut or was_aborted(answer)
                return answer
            before = answer
        self.cut = True
        return before or {"text": "", "output_ids": [], "meta_info": dict(ABORTED_META)}


_CURRENT: ContextVar[Runtime] = ContextVar("slime_rollout")
_OF_THREADS: list[Runtime] = []


def current() -> Runtime:
    """The rollout this code runs in.

    Raises:
        PluginError: it runs outside of any.
    """
    found = current_or_none()
    if found is None:
        raise PluginError(
            "generation and rewards are at hand only inside a generate or reward function that "
            "slime-flow called (and not in its grader processes: make the function `async def`)"
        )
    return found


def current_or_none() -> Runtime | None:
    """The rollout this code runs in, None outside of any."""
    return _CURRENT.get(None) or (_OF_THREADS[0] if _OF_THREADS else None)
