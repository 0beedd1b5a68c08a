"""`slime check CONFIG.yaml [--flag value ...]`: everything a run needs, without starting it."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from slime_core.check.findings import Findings
from slime_core.check.inspection import CHECK_SCAN_S, inspect
from slime_core.config.flags import FlagParser, add_flags, overrides_of
from slime_core.config.loading import load_config
from slime_core.doors.command_line import parse

SHOWN_CHARACTERS = 200


def main(arguments: list[str]) -> int:
    """Prints the report; 2 if something would keep the run from starting."""
    begun_s = time.monotonic()
    parsed = parse(_parser(), arguments)
    config = load_config(parsed.config or {}, overrides_of(parsed))
    findings = inspect(config, scan_s=CHECK_SCAN_S, thorough=True)
    seconds = time.monotonic() - begun_s
    if parsed.json:
        print(json.dumps(_as_json(findings, seconds), indent=2, ensure_ascii=False))
    else:
        print("\n".join(_lines(findings, seconds)))
    return 2 if findings.problems else 0


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="slime check",
        usage="slime check CONFIG.yaml [--flag value ...]",
        description="Look at everything a run needs and show its plan, without starting it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="the run's configuration")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    add_flags(parser)
    return parser


def _as_json(findings: Findings, seconds: float) -> dict[str, Any]:
    return {
        "problems": findings.problems,
        "notes": findings.notes,
        **findings.facts,
        "seconds": round(seconds, 3),
    }


def _lines(findings: Findings, seconds: float) -> list[str]:
    lines: list[str] = []
    for section, facts in findings.facts.items():
        width = max(map(len, facts), default=0)
        lines += [section, *(f"  {k:<{width}}  {_shown(k, v)}" for k, v in facts.items()), ""]
    if findings.notes:
        lines += ["notes", *(f"  {text}" for text in findings.notes), ""]
    if findings.problems:
        lines += ["problems", *(f"  {text}" for text in findings.problems), ""]
        return [*lines, f"{len(findings.problems)} to mend; looked at in {seconds:.1f} s"]
    return [*lines, f"ready to train; looked at in {seconds:.1f} s"]


def _shown(name: str, value: Any) -> str:
    if "bytes" in name and isinstance(value, int):
        return f"{value / 2**30:.2f} GiB" if value >= 2**27 else f"{value:,}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = str(value)
    if name == "first_prompt":
        text = repr(text)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
