"""What to do next: a pure function of what the store holds.

Nothing about a run's progress is kept anywhere else, so a start after any crash is a start like any
other: read the history, plan, go on.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slime_core.errors import DigestError
from slime_core.run.frontier import Frontier, GroupLog, GroupState
from slime_core.store.batch import Batch
from slime_core.store.checkpoints import Checkpoint
from slime_core.store.draws import Draw
from slime_core.store.ledger import Ledger, chain_states
from slime_core.store.seal import Seal, Segment

INITIAL = -1  # the iteration of the initial weights, which are a checkpoint, too


class Action(enum.Enum):
    """Where the next iteration stands."""

    OPEN = "open a segment"
    ADOPT = "go on with an open segment"
    PACK = "pack a sealed segment"
    TRAIN = "train a packed batch"
    FINISHED = "nothing left to train"


@dataclass(frozen=True)
class History:
    """What the store holds of a run, read and verified piece by piece.

    Attributes:
        start: S_-1.
        draws: files of draws in their order, without samples.
        seals: by segment.
        unsealed: segments with parts but without a seal, as adopted.
        batches, ledgers: by iteration.
        checkpoints: final ones, in any order.
        synced: iterations whose weights were published.
    """

    start: str
    draws: Sequence[Sequence[Draw]] = ()
    seals: Mapping[int, Seal] = field(default_factory=dict)
    unsealed: Mapping[int, Segment] = field(default_factory=dict)
    batches: Mapping[int, Batch] = field(default_factory=dict)
    ledgers: Mapping[int, Ledger] = field(default_factory=dict)
    checkpoints: Sequence[Checkpoint] = ()
    synced: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Plan:
    """How a run goes on.

    Attributes:
        last: K, the last trained iteration, -1 before the first.
        states: S_-1, S_0 .. S_K; `states[i + 1]` belongs to iteration i.
        checkpoints: final ones on the chain, the newest iteration first: load the first that
            verifies, or the initial weights. Empty also means: the initial weights.
        trainer_kept: a living trainer stands at S_K, nothing is loaded or replayed.
        iteration: K + 1.
        action: where that iteration stands.
        publish: the weights after K were never recorded as published.
        log: what became of every draw.
        frontier: where the data go on.
    """

    last: int
    states: tuple[str, ...]
    checkpoints: tuple[Checkpoint, ...]
    trainer_kept: bool
    iteration: int
    action: Action
    publish: bool
    log: GroupLog
    frontier: Frontier

    @property
    def state(self) -> str:
        """S_K."""
        return self.states[-1]

    def replay(self, checkpoint: Checkpoint | None) -> range:
        """Iterations to train again, without a ledger, after loading a checkpoint (None: the
        initial weights)."""
        if self.trainer_kept:
            return range(0)
        loaded = INITIAL if checkpoint is None else checkpoint.iteration
        return range(loaded + 1, self.last + 1)

    @property
    def to_generate(self) -> list[GroupState]:
        """Draws to generate before any new one, each with its attempt."""
        return self.log.open_groups()


def plan(history: History, num_rollout: int, trainer_state: str | None = None) -> Plan:
    """Decides how a run goes on.

    Args:
        num_rollout: iterations the run is to have.
        trainer_state: S of a trainer that is alive and untainted, None without one.

    Raises:
        DigestError: the chain has a gap or an entry that does not follow; names the file.
    """
    digests = {i: batch.digest for i, batch in history.batches.items()}
    states = chain_states(history.start, history.ledgers, digests)
    last = len(states) - 2
    iteration = last + 1
    on_chain = [
        checkpoint
        for checkpoint in history.checkpoints
        if checkpoint.iteration <= last and states[checkpoint.iteration + 1] == checkpoint.state
    ]
    on_chain.sort(key=lambda item: (item.iteration, item.epoch), reverse=True)
    frontier = Frontier()
    for draws in history.draws:
        frontier = frontier.after(draws)
    log = GroupLog.build(
        (draw for draws in history.draws for draw in draws),
        (seal.as_segment() for seal in history.seals.values()),
        history.unsealed.values(),
        (batch.content for batch in history.batches.values()),
    )
    return Plan(
        last=last,
        states=states,
        checkpoints=tuple(on_chain),
        trainer_kept=trainer_state == states[-1],
        iteration=iteration,
        action=_action(history, iteration, num_rollout),
        publish=last >= 0 and last not in history.synced,
        log=log,
        frontier=frontier,
    )


def next_untrained(history: History) -> int:
    """The iteration at which a run without a trainer goes on: the first one without a batch.

    Raises:
        DigestError: a later one has a batch.
    """
    k = next(i for i in range(len(history.batches) + 1) if i not in history.batches)
    if k < len(history.batches):
        raise DigestError(f"iteration {k} has no batch, but iteration {max(history.batches)} has")
    return k


def _action(history: History, iteration: int, num_rollout: int) -> Action:
    """In synchronous training segment k belongs to iteration k."""
    if iteration >= num_rollout:
        return Action.FINISHED
    if iteration in history.batches:
        return Action.TRAIN
    if iteration in history.seals:
        return Action.PACK
    drawn = any(draw.segment == iteration for draws in history.draws for draw in draws)
    if drawn or iteration in history.unsealed:
        return Action.ADOPT
    return Action.OPEN
