"""Whole stored runs of a few iterations, for commands that read them."""

from __future__ import annotations

from pathlib import Path

from slime_core.store import layout
from slime_core.store.backend import Backend, open_backend
from slime_core.store.documents import put_document
from slime_core.store.ledger import initial_state
from tests.unit.store.builders import run_iteration

START = initial_state("weights")


def stored_run(store: Path, run_id: str, iterations: int, created: str = "2026-01-01") -> Backend:
    """A run below a store's folder, with its entry in the index."""
    run = open_backend(str(store / run_id))
    body = {"run_id": run_id, "format_version": 1, "identity": {}, "identity_digest": "i"}
    for backend, key in ((run, layout.RUN), (open_backend(str(store)), f"runs/{run_id}.json")):
        put_document(backend, key, body, {"created": created})
    state, seal = START, ""
    for k in range(iterations):
        state, seal = run_iteration(run, k, state, seal)
    return run
