"""The `slime` command: `slime train CONFIG.yaml`, `slime doctor`."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from slime_core import __version__

COMMANDS = {
    "train": "train a model, or take up an unfinished run",
    "check": "look at everything a run needs and show its plan, without starting it",
    "contract": "try a reward, generate or other function of your own on realistic data",
    "up": "start Prefect's server, a worker and MLflow's page in the background",
    "down": "end what `slime up` started",
    "status": "the services of a workspace, and its runs that are alive",
    "stop": "end a running training cleanly, wherever it was started",
    "resume": "go on with a run as it was configured last",
    "reap": "end what a run has left on a Ray cluster",
    "open": "where a run is to be seen: its pages, its store, its logs",
    "logs": "what the processes of a run have logged",
    "runs": "list the runs of a workspace or store",
    "verify": "check everything a run stores against what was signed",
    "query": "ask SQL about iterations, groups, samples and tokens",
    "export": "write every stored row of a run to a Parquet file",
    "replay": "train stored batches again, as they were or with other flags, and compare",
    "compare": "what other algorithms would make of a stored batch",
    "audit": "train a stored iteration in another layout or precision, and compare each metric",
    "eval": "evaluate a run's stored weights, or a model, on held-out prompts",
    "rescore": "grade stored samples again with another grader",
    "fork": "start a new run from an iteration of another one",
    "gc": "compact a run's rows, give old ones up, delete what nothing needs",
    "config": "show, compare and describe configurations, or make one from a launch script",
    "models": "dimensions of known models, for configurations and launch scripts",
    "doctor": "look at this machine: versions, devices, folders, ports",
}
USAGE = "\n".join(
    [
        "usage: slime COMMAND [...]",
        "",
        "Reinforcement-learning post-training of language models.",
        "",
        "commands:",
        *(f"  {name:<8} {text}" for name, text in COMMANDS.items()),
        "",
        "  slime COMMAND --help lists the flags of a command; slime --version tells the version.",
    ]
)

READER_GONE = 141
"""The status that a shell shows for a program that SIGPIPE ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if given else 2
    if given[0] == "--version":
        print(f"slime-flow {__version__}")
        return 0
    return _guarded(given[0], given[1:])


def _guarded(name: str, arguments: list[str]) -> int:
    """Turns what goes wrong into one sentence and an exit status."""
    from slime_core.errors import ConfigError, DataError, PluginError, SlimeError

    try:
        status = _command(name)(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _reader_is_gone():
            raise  # another pipe than the one we print to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except (ConfigError, DataError, PluginError) as error:
        return _complain(error, arguments, 2)
    except SlimeError as error:
        return _complain(error, arguments, 1)
    except KeyboardInterrupt:
        return 130


def _reader_is_gone() -> bool:
    """Whether nobody reads any more what is printed, as behind `| head`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _command(name: str) -> Callable[[list[str]], int]:
    from slime_core.errors import ConfigError
    from slime_core.near import nearest

    if name not in COMMANDS:
        close = nearest(name, COMMANDS)
        hint = f"did you mean {close}?" if close else f"there are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {name}: {hint}")
    command: Callable[[list[str]], int] = import_module(f"flows.cli.{name}").main
    return command


def _complain(error: Exception, arguments: list[str], status: int) -> int:
    if "--debug" in arguments:
        raise error
    print(f"slime: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
