"""What a process on a cluster takes over from the command that it works for.

A child inherits environment and working directory. A process that somebody else's Ray starts has
those of that Ray. They travel as an argument of the actor and not as Ray's runtime environment,
which Ray writes to its logs in clear: there are keys among them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

OF_THE_MACHINE = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|SHLVL|_|HOSTNAME|TERM|TMPDIR|DISPLAY|LD_.*|PYTHON.*"
    r"|VIRTUAL_ENV.*|XDG_.*|SSH_.*|DBUS_.*|RAY_.*|CUDA_VISIBLE_DEVICES|NVIDIA_.*|PREFECT_.*"
)
"""Variables that say where a process is, or that belong to Ray or to Prefect's client."""


@dataclass(frozen=True)
class Place:
    """Environment variables and a working directory.

    Attributes:
        folder: where it is on this machine, too.
        variables: secrets may be among them, so they are never shown.
    """

    folder: str
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def here(cls) -> Place:
        """That of this process, without what belongs to its machine."""
        chosen = {k: v for k, v in os.environ.items() if not OF_THE_MACHINE.fullmatch(k)}
        return cls(str(Path.cwd()), chosen)

    def take(self) -> None:
        """Makes it the one of this process."""
        os.environ.update(self.variables)
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
