"""A run without models: every store step is real, generation and training are functions of ids."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from slime_core.run.history import read_history
from slime_core.run.plan import Action, Plan, plan
from slime_core.store import layout
from slime_core.store.backend import Backend, Data, MemoryBackend
from slime_core.store.batch import BatchContent, BatchGroup, put_batch
from slime_core.store.cache import NodeCache
from slime_core.store.documents import Owner, put_document
from slime_core.store.draws import Draw, log_draws
from slime_core.store.ledger import initial_state, next_state, put_ledger, put_sync
from slime_core.store.parts import GroupRows, write_part
from slime_core.store.seal import adopt, put_seal
from tests.unit.store.builders import FakeOwner, finished_sample, prompt_sample

START = initial_state("weights")
GROUPS = 2  # a batch
DATASET_ROWS = 7


class Killed(Exception):
    """The process died here."""


class MortalBackend(MemoryBackend):
    """Dies at the n-th write, before or after it took effect."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.dies_at: int | None = None
        self.after = False

    def put_new(self, key: str, data: Data) -> None:
        self.writes += 1
        dies = self.dies_at is not None and self.writes >= self.dies_at
        if dies and not self.after:
            raise Killed(key)
        super().put_new(key, data)
        if dies:
            raise Killed(key)

    def restart(self, dies_at: int | None, after: bool) -> None:
        self.writes, self.dies_at, self.after = 0, dies_at, after

    def dump(self, folder: Path) -> None:
        """Writes everything as a local store has it."""
        for entry in self.list():
            path = folder / entry.key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.get(entry.key))


def verdict_of(group_id: int, attempt: int) -> str:
    """What becomes of an attempt; the same whenever it is made."""
    dice = random.Random(f"{group_id}-{attempt}")
    return dice.choices(("kept", "dropped", "aborted", "failed"), (12, 3, 3, 1))[0]


def surplus_of(segment: int) -> int:
    """Groups that finish beyond what the batch needs."""
    return segment % 3 == 1


@dataclass
class Life:
    """One process of a run, from its start to its end or death."""

    backend: Backend
    owner: Owner
    num_rollout: int

    def live(self) -> Plan:
        """Plans, does one thing, plans again, until nothing is left. Returns the last plan."""
        self.cache, self.seq = NodeCache(self.backend), 0
        self.trainer: str | None = None
        while True:
            now = plan(read_history(self.cache, START), self.num_rollout, self.trainer)
            self._restore(now)
            if now.publish:
                put_sync(self.backend, now.last, f"a-{now.last + 1}")
            if now.action is Action.FINISHED:
                return now
            if now.action in (Action.OPEN, Action.ADOPT):
                self._generate(now)
            elif now.action is Action.PACK:
                self._pack(now)
            else:
                self._train(now)

    def _restore(self, now: Plan) -> None:
        """What the executor does with a plan: load a checkpoint, replay to S_K."""
        if self.trainer is not None:
            assert now.trainer_kept and list(now.replay(None)) == []
            return
        assert not now.trainer_kept
        loaded = now.checkpoints[0] if now.checkpoints else None
        state = START if loaded is None else loaded.state
        for iteration in now.replay(loaded):
            digest = read_history(self.cache, START).batches[iteration].digest
            state = next_state(state, digest, "n")
        assert state == now.state
        self.trainer = state

    def _generate(self, now: Plan) -> None:
        segment, log, frontier = now.iteration, now.log, now.frontier
        kept = sum(
            state.segment == segment and state.stored.entry.verdict == "kept"
            for state in log.groups.values()
            if state.stored is not None
        )
        waiting = [(state.draw, state.next_attempt) for state in now.to_generate]
        while kept < GROUPS + surplus_of(segment):
            if not waiting:
                first = frontier.next_group_id
                draws = [self._draw(first + i, segment) for i in range(3)]
                lost = log_draws(self.backend, frontier.next_seq, draws)
                assert lost is None, "the frontier named a number that is taken"
                frontier = frontier.after(draws)
                waiting = [(draw, 0) for draw in draws]
            draw, attempt = waiting.pop(0)
            verdict = verdict_of(draw.group_id, attempt)
            self._store(draw, attempt, verdict, segment)
            kept += verdict == "kept"
            if verdict in ("aborted", "failed"):
                waiting.insert(0, (draw, attempt + 1))
        found = adopt(self.cache, segment)
        last = frontier.next_group_id
        put_seal(
            self.backend, self.owner, found, parent=self._parent(segment), draws=(0, last),
            tokenizer_digest="t",
        )  # fmt: skip

    def _draw(self, group_id: int, segment: int) -> Draw:
        epoch, position = divmod(group_id, DATASET_ROWS)
        return Draw(group_id, epoch, position, segment, [prompt_sample(group_id)])

    def _store(self, draw: Draw, attempt: int, verdict: str, segment: int) -> None:
        samples = [finished_sample(draw.group_id)]
        rows = GroupRows(
            draw.group_id, attempt, draw.data_epoch, draw.position, samples, verdict, None
        )
        write_part(self.backend, segment, self.owner.epoch, self.seq, [rows])
        self.seq += 1

    def _parent(self, segment: int) -> str:
        seals = read_history(self.cache, START).seals
        return seals[segment - 1].digest if segment else ""

    def _pack(self, now: Plan) -> None:
        ready = now.log.ready_groups()
        chosen, surplus = ready[:GROUPS], ready[GROUPS:]
        entries = [(state, state.stored.entry) for state in chosen if state.stored is not None]
        seal = read_history(self.cache, START).seals[now.iteration]
        content = BatchContent(
            iteration=now.iteration,
            groups=tuple(
                BatchGroup(e.group_id, e.attempt, state.segment, e.rows, e.digest)
                for state, e in entries
            ),
            seals={now.iteration: seal.digest},
            rewards=[0.0] * GROUPS,
            raw_rewards=[0.0] * GROUPS,
            rollout_ids=list(range(GROUPS)),
            denominators=[1.0] * GROUPS,
            steps=(tuple(range(GROUPS)),),
            unused=tuple(
                (state.group_id, state.next_attempt - 1, state.segment, "surplus")
                for state in surplus
            ),
        )
        put_batch(self.backend, self.owner, content)

    def _train(self, now: Plan) -> None:
        batch = read_history(self.cache, START).batches[now.iteration]
        entry = put_ledger(
            self.backend, self.owner, iteration=now.iteration, parent=now.state,
            batch_digest=batch.digest, numeric_digest="n", weight_version=f"a-{now.iteration + 1}",
            result={"steps": [{"loss": 0.0}]},
        )  # fmt: skip
        self.trainer = entry.state
        if now.iteration % 2:
            body = {
                "iteration": now.iteration, "state": entry.state, "about": {}, "files": [],
                "weight_version": entry.weight_version,
            }  # fmt: skip
            put_document(self.backend, layout.manifest(now.iteration, self.owner.epoch), body)


def run_with_deaths(num_rollout: int, deaths: list[tuple[int, bool]]) -> tuple[MortalBackend, Plan]:
    """Lives one life after another until the run is finished.

    Args:
        deaths: for each life that ends early, (write at which it dies, whether that took effect).
    """
    backend = MortalBackend()
    for epoch, (dies_at, after) in enumerate(deaths):
        backend.restart(dies_at, after)
        try:
            return backend, Life(backend, FakeOwner(epoch), num_rollout).live()
        except Killed:
            continue
    backend.restart(None, False)
    return backend, Life(backend, FakeOwner(len(deaths)), num_rollout).live()
