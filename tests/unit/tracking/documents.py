"""Store documents as the stages write them, for the tests of this folder."""

from slime_core.store import layout
from slime_core.store.backend import Backend
from slime_core.store.documents import put_document


def write_iteration(store: Backend, k: int, reward: float = 0.5, sync: bool = True) -> None:
    """Batch, ledger and (unless the run was killed before it) sync of iteration k."""
    batch = {"metrics": {"raw_reward": reward, "rollout/response_tokens": 640, "groups/kept": 16}}
    put_document(store, layout.batch(k), batch, {})
    steps = [
        {"loss": 0.25, "grad_norm": 1.0, "lr": 1e-3, "skipped": False, "weights_digest": "ab"},
        {"loss": 0.75, "grad_norm": 3.0, "lr": 2e-3, "skipped": False, "weights_digest": "cd"},
    ]
    seconds = {"sample": 0.25, "generate": 4.0, "reward": 0.0, "pack": 0.25}
    by = {"seconds": seconds, "wall_s": 4.75, "train_seconds": {"log_probs": 1.0, "steps": 3.5}}
    put_document(store, layout.ledger(k), {"result": {"steps": steps}, "state": str(k)}, by)
    if sync:
        by = {"seconds": {**seconds, "train": 5.0, "sync": 0.5}, "canary": 2e-6, "engines": 1}
        put_document(store, layout.sync(k), {"version": f"a-{k + 1}", "iteration": k}, by)


def write_evaluation(store: Backend, n: int, dataset: str = "sort", accuracy: float = 0.5) -> str:
    """The evaluation of the weights that contain n iterations; returns its key."""
    key = layout.evaluation(f"a-{n}", dataset)
    metrics = {"reward": accuracy, "accuracy": accuracy}
    body = {"dataset": dataset, "version": f"a-{n}", "iteration": n - 1, "metrics": metrics}
    put_document(store, key, body, {})
    return key
