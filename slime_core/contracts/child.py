"""The process of one trial: `python -m slime_core.contracts.child HOOK PATH [CONFIG]`.

Its result is one JSON line on the standard output as it was at the start; whatever the function
prints goes to standard error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from slime_core.errors import SlimeError
from slime_core.plugins.user_code import raised


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    name, path, *config = sys.argv[1:]
    from slime_core.contracts.trials import trial

    try:
        lines = asyncio.run(trial(name, path, config[0] if config else None))
        result = {"lines": lines}
    except SlimeError as error:
        result = {"error": str(error)}
    except Exception as error:
        where = _where(error, path)
        result = {"error": f"{path} raised {raised(error)}{where}"}
    answers.write(json.dumps(result).encode() + b"\n")
    os._exit(0)  # whatever threads it left


def _where(error: BaseException, path: str) -> str:
    """The last line of the user's own file in a traceback."""
    file, found = path.rpartition(":")[0] or path, ""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(Path(file).name):
            found = f" (line {trace.tb_lineno})"
        trace = trace.tb_next
    return found


if __name__ == "__main__":
    main()
