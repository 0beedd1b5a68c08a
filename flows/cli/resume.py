"""`slime resume RUN [--flag value ...]`: goes on with a run under its recorded configuration."""

from __future__ import annotations

from flows.stop import Stopper


def main(arguments: list[str]) -> int:
    """Trains; returns the exit status.

    Raises:
        SlimeError: what stopped the run, as one sentence.
    """
    with Stopper() as stopper:  # before anything that takes a while to load
        from flows.cli.start import Command, resume_parser
        from flows.cli.stored import open_run
        from slime_core.check.inspection import require
        from slime_core.config.block_names import blocks_in
        from slime_core.config.flags import overrides_of
        from slime_core.doors.command_line import parse
        from slime_core.run.recorded import last_config

        options = parse(resume_parser(), arguments)
        options.workspace = getattr(options, "workspace", "runs")
        options.store_url = getattr(options, "store_url", None)
        run_id, cache = open_run(options)
        given = {name: value for name, value in overrides_of(options).items() if value is not None}
        if "store_url" in blocks_in(last_config(cache.backend, {})):
            given.pop("store_url", None)  # the flag finds the run, the block has the keys
        options.run_id, options.new = run_id, False
        config = last_config(cache.backend, given)
        for note in require(config):
            print(f"note: {note}")
        return Command(config, options, stopper).run()
