"""`slime eval RUN|CHECKPOINT|HF_DIR [--flag value ...]`: evaluate weights on held-out prompts."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from flows.cli.stored import show
from flows.server import ServerError, api_answers, client_environment, configured_api_url
from flows.services.stack import api_url_of
from slime_core.config.flags import FlagParser, add_flags, overrides_of
from slime_core.config.secrets import HIDDEN, is_secret
from slime_core.doors.command_line import parse
from slime_core.evaluation.target import Place

COLUMNS = ("dataset", "reward", "samples", "response_len/mean", "truncated_ratio")


def main(arguments: list[str]) -> int:
    """Prints a line for each dataset.

    Raises:
        SlimeError: what is wrong, or what stopped it.
    """
    options = parse(_parser(), arguments)
    overrides = overrides_of(options)
    place = Place(overrides.pop("workspace", "runs"), overrides.pop("store_url", None))
    as_flow = not options.no_prefect and _choose_server(Path(place.workspace))
    from flows.cli.terminal_logs import quiet_console
    from flows.evaluate import PLAIN, PREPARED, evaluate, evaluated, prepare, rows_of

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    async def work() -> Any:
        prepared = await prepare(
            options.target, options.version, options.config, overrides, place, say
        )
        logs = prepared.target.paths.logs
        logs.mkdir(parents=True, exist_ok=True)
        quiet_console(say, logs / "evaluate.log")
        if not as_flow:
            await evaluated(prepared, PLAIN)
            return prepared
        PREPARED.set(prepared)
        await evaluate(options.target, options.version, overrides=_shown(overrides))
        return prepared

    prepared = asyncio.run(work())
    target, rows = prepared.target, rows_of(prepared.target, prepared.results)
    if options.json:
        keys = {one.dataset: one.key for one in prepared.results}
        about = {"target": target.owner, "version": target.version, "store": target.backend.url}
        for row in rows:
            print(json.dumps({**about, "key": keys[row["dataset"]], **row}))
        return 0
    print(f"{target.owner}, weights {target.version}")
    names = [name for name in rows[0] if name in COLUMNS or name.startswith("pass@")]
    show([{name: row[name] for name in names} for row in rows], as_json=False)
    for one in prepared.results:
        print(f"{'found' if one.found else 'stored'}  {target.backend.url}/{one.key}")
    for note in prepared.notes:
        print(f"note: {note}")
    return 0


def _parser() -> FlagParser:
    made = FlagParser(
        prog="slime eval",
        usage="slime eval RUN|CHECKPOINT|HF_DIR [--version N] [--flag value ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="A run's own settings count where no flag says otherwise.",
    )
    made.add_argument(
        "target", metavar="RUN|CHECKPOINT|HF_DIR",
        help="a run (id, its beginning, `last`), a checkpoint's folder, or a model's folder",
    )  # fmt: skip
    made.add_argument(
        "--version", metavar="N", help="weights after N iterations of the run; default the newest"
    )
    made.add_argument("--config", metavar="CONFIG.yaml", help="a configuration with the settings")
    made.add_argument("--no-prefect", action="store_true", help="do not show it in Prefect's pages")
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    add_flags(made)
    return made


def _choose_server(workspace: Path) -> bool:
    """Points Prefect's client at the user's API, else at that of `slime up`; False without one."""
    chosen, service = configured_api_url(), api_url_of(workspace)
    if chosen is not None:
        url, origin = chosen
        if not api_answers(url, timeout_s=5):
            raise ServerError(
                f"Prefect's API at {url} (from {origin}) does not answer: start it, unset it, or "
                "add --no-prefect"
            )
        os.environ.update(client_environment(url, None))
    elif service is not None:
        os.environ.update(client_environment(service, workspace.resolve() / "prefect"))
    return chosen is not None or service is not None


def _shown(overrides: dict[str, Any]) -> dict[str, Any]:
    """The overrides as the flow's page may show them."""
    return {
        name: _shown(value) if isinstance(value, dict) else HIDDEN if is_secret(name) else value
        for name, value in overrides.items()
    }
