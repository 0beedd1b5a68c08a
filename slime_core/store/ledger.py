"""The ledger: what training did, as a chain of digests.

S_-1 names the initial weights. S_k names everything that was trained up to iteration k: the batches
in their order and the numbers they were trained with. A ledger entry is written once its iteration
has been applied on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_core.errors import DigestError, MissingError
from slime_core.refs import Ref, digest_of
from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.batch import read_batch
from slime_core.store.documents import Document, Owner, put_document, read_document

STATE_FORMAT = 1


def initial_state(weights_digest: str) -> str:
    """S_-1, the state before the first iteration."""
    return digest_of(["initial", weights_digest, STATE_FORMAT])


def next_state(parent: str, batch_digest: str, numeric_digest: str) -> str:
    """S_k from S_{k-1}, the batch's digest and that of the numeric configuration."""
    return digest_of(["iteration", parent, batch_digest, numeric_digest])


@dataclass(frozen=True)
class Ledger:
    """What one iteration did.

    Attributes:
        iteration: k.
        parent, state: S_{k-1} and S_k.
        batch_digest, numeric_digest: what S_k was made of.
        weight_version: version of the weights after it.
        result: as the trainer gave it: `steps` (loss, grad_norm, lr, skipped, weights_digest and
            further metrics of each optimizer step) and `metrics`.
        by: epoch, seconds and the like.
        digest: of the entry.
    """

    iteration: int
    parent: str
    state: str
    batch_digest: str
    numeric_digest: str
    weight_version: str
    result: dict[str, Any]
    by: dict[str, Any]
    digest: str
    found: bool = False

    def ref(self) -> Ref:
        key = layout.ledger(self.iteration)
        return Ref(key, "ledger", self.iteration, digest=self.digest, from_store=self.found)

    @property
    def forced_skips(self) -> tuple[bool, ...]:
        """Which optimizer steps were skipped, so that a replay skips them, too."""
        return tuple(bool(step.get("skipped", False)) for step in self.result["steps"])


def put_ledger(
    backend: Backend,
    owner: Owner,
    *,
    iteration: int,
    parent: str,
    batch_digest: str,
    numeric_digest: str,
    weight_version: str,
    result: dict[str, Any],
    by: dict[str, Any] | None = None,
) -> Ledger:
    """Records an applied iteration; only now may its weights be published.

    Raises:
        StaleOwnerError: another owner recorded something else, or owns the run.
    """
    body = {
        "iteration": iteration,
        "parent": parent,
        "state": next_state(parent, batch_digest, numeric_digest),
        "batch": batch_digest,
        "numeric": numeric_digest,
        "weight_version": weight_version,
        "result": result,
    }
    return _ledger(put_document(backend, layout.ledger(iteration), body, by, owner=owner))


def read_ledger(backend: Backend, iteration: int) -> Ledger | None:
    """The entry of an iteration, None before it is trained. Raises DigestError if damaged."""
    try:
        return _ledger(read_document(backend, layout.ledger(iteration)))
    except MissingError:
        return None


def list_ledgers(backend: Backend) -> list[int]:
    """Iterations that have an entry, ascending."""
    found = [layout.parse_iteration(entry.key) for entry in backend.list(layout.ITERATIONS)]
    return sorted(item[0] for item in found if item is not None and item[1] == "ledger")


def chain_states(
    start: str, ledgers: Mapping[int, Ledger], batch_digests: Mapping[int, str]
) -> tuple[str, ...]:
    """S_-1, S_0 .. S_K, each recomputed from the one before and from the batch that is stored.

    Args:
        start: S_-1.
        ledgers, batch_digests: by iteration.

    Raises:
        DigestError: an entry is missing before a later one, or one does not follow from what it
            names; says which file.
    """
    states = [start]
    for expected, iteration in enumerate(sorted(ledgers)):
        key, entry = layout.ledger(expected), ledgers[iteration]
        if iteration != expected:
            raise DigestError(f"{key} is missing, but {layout.ledger(iteration)} is there")
        if iteration not in batch_digests:
            raise DigestError(f"{layout.batch(iteration)} is missing, but {key} is there")
        if batch_digests[iteration] != entry.batch_digest:
            raise DigestError(f"{key} was trained on another {layout.batch(iteration)}")
        follows = next_state(states[-1], entry.batch_digest, entry.numeric_digest)
        if entry.parent != states[-1] or entry.state != follows:
            raise DigestError(f"{key} does not follow from the entries before it")
        states.append(entry.state)
    return tuple(states)


def unbroken_chain(backend: Backend, start: str) -> list[Ledger]:
    """Reads all entries 0..K and verifies that each follows. Raises DigestError as `chain_states`.

    Args:
        start: S_-1.
    """
    ledgers = {i: entry for i in list_ledgers(backend) if (entry := read_ledger(backend, i))}
    batches = {i: batch.digest for i in ledgers if (batch := read_batch(backend, i))}
    chain_states(start, ledgers, batches)
    return [ledgers[i] for i in sorted(ledgers)]


def put_sync(
    backend: Backend, iteration: int, version: str, by: dict[str, Any] | None = None
) -> Document:
    """Records that the engines serve the weights after an iteration.

    Args:
        by: canary difference, engines, seconds. The first record stays: a repeated transfer of the
            same version measures other values.
    """
    body = {"iteration": iteration, "version": version}
    return put_document(backend, layout.sync(iteration), body, by)


def _ledger(document: Document) -> Ledger:
    body = document.body
    return Ledger(
        iteration=body["iteration"],
        parent=body["parent"],
        state=body["state"],
        batch_digest=body["batch"],
        numeric_digest=body["numeric"],
        weight_version=body["weight_version"],
        result=body["result"],
        by=document.by,
        digest=document.digest,
        found=document.found,
    )
