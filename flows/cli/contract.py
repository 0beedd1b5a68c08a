"""`slime contract [HOOK my.py [CONFIG.yaml]]`: tries a function of one's own before a run does."""

from __future__ import annotations

import argparse

from slime_core.config.flags import FlagParser, parse
from slime_core.contracts.hooks import HOOKS, hook_named
from slime_core.contracts.process import try_out
from slime_core.errors import ConfigError

LIMIT_S = 60.0


def main(arguments: list[str]) -> int:
    """Lists the hooks, or prints what a function did; raises what is wrong with it."""
    if len(arguments) > 1 and not arguments[1].startswith("--"):  # HOOK as its flag
        arguments = [arguments[0].removeprefix("--"), *arguments[1:]]
    parsed = parse(_parser(), arguments)
    if parsed.hook is None:
        print("\n".join(_listed()))
        return 0
    hook = hook_named(parsed.hook)
    if parsed.path is None:
        raise ConfigError(
            f"name the function to try: slime contract {hook.name} my.py:function; it is written "
            f"as {hook.call}"
        )
    lines = try_out(hook.name, parsed.path, parsed.config, parsed.timeout_s)
    print(f"{parsed.path} fits {hook.name}, which is called {hook.about}")
    print("\n".join(f"  {line}" for line in lines))
    return 0


def _listed() -> list[str]:
    lines = ["hooks, for `slime contract HOOK my.py:function`:"]
    for hook in HOOKS:
        lines += ["", hook.name, f"  {hook.call}", f"  called {hook.about}"]
    return lines


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="slime contract",
        usage="slime contract [HOOK my.py:function [CONFIG.yaml]]",
        description="Load a function of your own, call it on realistic data in a process that can "
        "be killed, and say in one sentence what is wrong with it. Without arguments: list the "
        "hooks.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("hook", nargs="?", metavar="HOOK", help="a setting such as custom_rm_path")
    parser.add_argument("path", nargs="?", metavar="my.py:function", help="what to try")
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="what it reads from args")
    parser.add_argument("--timeout-s", type=float, default=LIMIT_S, help="how long it may take")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser
