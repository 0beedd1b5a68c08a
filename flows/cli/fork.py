"""`slime fork RUN --at K --run-id NEW`: a new run that begins with the history of another one."""

from __future__ import annotations

import re

from flows.cli.stored import open_root, open_run, parser, place_flags, root_url, show
from slime_core.config.flags import parse
from slime_core.errors import ConfigError
from slime_core.run.best import best_checkpoint
from slime_core.run.fork import CHANGEABLE, fork_run, refuse_fork
from slime_core.store.backend import Backend, join_url, open_backend
from slime_core.store.checkpoints import list_checkpoints


def main(arguments: list[str]) -> int:
    """Makes the fork and says how to train it."""
    made = parser("fork", __doc__)
    made.add_argument(
        "--at",
        required=True,
        metavar="K|METRIC",
        help="last iteration that is shared, or a metric: that of the best checkpoint by it",
    )
    made.add_argument("--lowest", action="store_true", help="the lowest METRIC is the best")
    made.add_argument("--run-id", required=True, metavar="NEW", help="id of the new run")
    made.add_argument("--run-name", help="another name")
    made.add_argument("--seed", type=int, help="another seed from there on")
    made.add_argument("--n-samples-per-prompt", type=int, help="another size of the groups")
    options = parse(made, arguments)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", options.run_id):
        raise ConfigError(f"run id {options.run_id!r}: use letters, digits, '.', '_' and '-'")
    _, source = open_run(options)
    changes = {n: v for n in CHANGEABLE if (v := getattr(options, n)) is not None}
    root, new = open_root(options, write=True), options.run_id
    at = _iteration(source.backend, options.at, options.lowest)
    refuse_fork(root, source, run_id=new, at=at, changes=changes)  # before a folder is made
    target = open_backend(join_url(root_url(options), new))
    fork = fork_run(root, source, target, run_id=new, at=at, changes=changes)
    told = dict(vars(fork))
    if fork.checkpoint < 0 and not options.json:
        told["checkpoint"] = "initial weights"
    show([told], options.json)
    if not options.json:
        print(f"train it with: slime train CONFIG.yaml --run-id {new}{place_flags(options)}")
    return 0


def _iteration(run: Backend, at: str, lowest: bool) -> int:
    """The iteration that `--at` names.

    Raises:
        ConfigError: no checkpoint has such a metric.
    """
    if at.isdecimal():
        return int(at)
    best = best_checkpoint(run, list_checkpoints(run), at, lowest=lowest)
    if best is None:
        raise ConfigError(
            f"--at {at}: none of the run's checkpoints has a metric of this name; give an "
            "iteration, or a name of metrics.jsonl such as eval/greedy"
        )
    return best[0].iteration
