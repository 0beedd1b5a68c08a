"""`slime train CONFIG.yaml [--flag value ...]`."""

from __future__ import annotations

from flows.stop import Stopper


def main(arguments: list[str]) -> int:
    """Trains; returns the exit status.

    Raises:
        SlimeError: what stopped the run, as one sentence.
    """
    with Stopper() as stopper:  # before anything that takes a while to load
        from flows.cli.start import Command, parser
        from slime_core.check.inspection import require
        from slime_core.config.flags import overrides_of
        from slime_core.config.loading import load_config
        from slime_core.doors.command_line import parse

        parsed = parse(parser(), arguments)
        config = load_config(parsed.config or {}, overrides_of(parsed))
        for note in require(config):
            print(f"note: {note}")
        return Command(config, parsed, stopper).run()
