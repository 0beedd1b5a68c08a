"""`slime compare RUN@K --with gspo,rloo`: what algorithms would make of one stored batch.

Each is asked for the loss and the gradient of batch K with the weights before iteration K. Nothing
is trained and nothing is written to the run.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from flows.cli.replay import WHERE, build_rank
from flows.cli.stored import open_run, show
from slime_core.algorithms.advantages.registry import get_estimator
from slime_core.config.flags import FlagParser, add_flags, overrides_of
from slime_core.doors.command_line import parse
from slime_core.errors import ConfigError
from slime_core.run.compare import compare
from slime_core.run.identity import ONE_RANK, recorded_config
from slime_core.run.replay import ConfigOf, Replay
from slime_core.store.cache import NodeCache
from slime_core.store.scores import find_scorer

AS_IT_WAS = "as it was"


def main(arguments: list[str]) -> int:
    """Prints one line an algorithm."""
    options = parse(_parser(), arguments)
    options.workspace = getattr(options, "workspace", "runs")
    options.store_url = getattr(options, "store_url", None)
    options.run, at, number = options.run.partition("@")
    names = [name.strip() for name in options.algorithms.split(",") if name.strip()]
    for name in names:
        get_estimator(name)
    overrides = {k: v for k, v in overrides_of(options).items() if k not in WHERE}
    _, cache = open_run(options)
    variants = {AS_IT_WAS: config_with(cache, {})}
    variants |= {n: config_with(cache, overrides | {"advantage_estimator": n}) for n in names}
    scorer = find_scorer(cache.backend, options.scores) if options.scores else None
    with tempfile.TemporaryDirectory(prefix="slime-compare-") as scratch:
        replay = Replay(cache, build_rank, variants[AS_IT_WAS], Path(scratch), scorer)
        if not replay.chain:
            raise ConfigError(f"run {options.run} has trained nothing yet")
        if at and not number.isdecimal():
            raise ConfigError(f"{options.run}@{number}: write RUN@K, such as last@20")
        found = compare(replay, int(number) if at else len(replay.chain) - 1, variants)
    show([one.to_dict() for one in found], options.json)
    return 0


def config_with(cache: NodeCache, overrides: dict[str, object]) -> ConfigOf:
    """The configuration of each iteration's time for one rank, with other values."""
    return lambda ledger: recorded_config(
        cache.backend, ledger.numeric_digest, {**ONE_RANK, **overrides}
    )


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="slime compare",
        usage="slime compare RUN[@K] --with NAME[,NAME...] [--flag value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any flag of the configuration is set for the algorithms of --with.",
    )
    parser.add_argument("run", metavar="RUN@K", help="without @K: the iteration trained last")
    parser.add_argument(
        "--with",
        dest="algorithms",
        default="",
        metavar="NAMES",
        help="values of advantage_estimator",
    )
    parser.add_argument(
        "--scores", metavar="GRADER", help="use this overlay of `slime rescore` as rewards"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    add_flags(parser)
    return parser
