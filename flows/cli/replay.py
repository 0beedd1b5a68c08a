"""`slime replay RUN --iterations A:B`: train stored batches again and compare."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from flows.cli.stored import open_run, show
from slime_core.cluster.trainer_settings import trainer_settings
from slime_core.config.flags import FlagParser, add_flags, overrides_of
from slime_core.config.tree import RunConfig
from slime_core.doors.command_line import parse
from slime_core.engines.launcher import free_port
from slime_core.errors import ConfigError
from slime_core.run.identity import ONE_RANK, recorded_config
from slime_core.run.replay import Rank, Replay
from slime_core.store.ledger import Ledger
from slime_core.store.scores import find_scorer

WHERE = ("workspace", "store_url")


def main(arguments: list[str]) -> int:
    """Prints one line an iteration; 0 if nothing was changed and all weights are equal, or if
    something was."""
    options = parse(_parser(), arguments)
    options.workspace = getattr(options, "workspace", "runs")
    options.store_url = getattr(options, "store_url", None)
    overrides = {k: v for k, v in overrides_of(options).items() if k not in WHERE}
    _, cache = open_run(options)

    def recorded(ledger: Ledger) -> RunConfig:
        return recorded_config(cache.backend, ledger.numeric_digest, ONE_RANK)

    def changed(ledger: Ledger) -> RunConfig:
        return recorded_config(cache.backend, ledger.numeric_digest, ONE_RANK | overrides)

    scorer = find_scorer(cache.backend, options.scores) if options.scores else None
    with tempfile.TemporaryDirectory(prefix="slime-replay-") as scratch:
        replay = Replay(cache, build_rank, recorded, Path(scratch), scorer)
        if not replay.chain:
            raise ConfigError(f"run {options.run} has trained nothing yet")
        iterations = parse_range(options.iterations, len(replay.chain))
        found = list(replay.run(iterations, changed if overrides else None))
    show([one.to_dict() for one in found], options.json)
    drifted = [one for one in found if not one.same]
    changes = bool(overrides) or scorer is not None
    if not options.json:
        print(
            f"other weights from iteration {drifted[0].iteration} on{drifted[0].hint}"
            if drifted
            else "the same weights to the bit"
        )
    return 1 if drifted and not changes else 0


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="slime replay",
        usage="slime replay RUN [--iterations A:B] [--flag value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any flag of the configuration trains these iterations with another value.",
    )
    parser.add_argument("run", metavar="RUN", help="id, its beginning, or `last`")
    parser.add_argument("--iterations", metavar="A:B", help="A to B - 1; by default the last one")
    parser.add_argument(
        "--scores", metavar="GRADER", help="use this overlay of `slime rescore` as rewards"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    add_flags(parser)
    return parser


def parse_range(text: str | None, trained: int) -> range:
    """`10:20` is 10 to 19, `10` is one iteration, nothing is the last one.

    Raises:
        ConfigError: it is no range.
    """
    if text is None:
        return range(max(0, trained - 1), trained)
    first, colon, end = text.partition(":")
    try:
        start = int(first) if first else 0
        stop = int(end) if end else trained
        found = range(start, stop if colon else start + 1)
    except ValueError as error:
        raise ConfigError(f"{text}: write A:B, such as 10:20") from error
    if start < 0 or not found:
        raise ConfigError(f"{text}: write A:B with 0 <= A < B")
    return found


def build_rank(config: RunConfig) -> Rank:
    """A trainer in this process."""
    from slime_core.cluster.device import resolve_device
    from slime_core.megatron.rank import TrainerRank

    return TrainerRank(trainer_settings(config, resolve_device(config), 0, free_port()))
