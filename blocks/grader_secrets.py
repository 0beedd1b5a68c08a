"""Secrets of graders."""

from __future__ import annotations

import re

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from slime_core.errors import ConfigError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED = re.compile(r"(PATH|LD_.*|PYTHON.*|PREFECT_.*|RAY_.*|SLIME_.*|OMP_.*|CUDA_.*)")


class GraderSecrets(Block):
    """Environment variables that graders find, such as the key of a judge model.

    A configuration names it as `grader_secrets: block:NAME`.
    """

    _block_type_name = "slime GraderSecrets"
    _block_type_slug = "slime-grader-secrets"

    entries: dict[str, SecretStr] = Field(
        default_factory=dict, description="Name of the environment variable and its value."
    )

    def environment(self) -> dict[str, str]:
        """The entries in clear.

        Raises:
            ConfigError: a name cannot be that of an environment variable, or is not free.
        """
        for name in self.entries:
            if not NAME.fullmatch(name) or RESERVED.fullmatch(name):
                raise ConfigError(f"grader secret {name!r}: use another name, such as JUDGE_KEY")
        return {name: value.get_secret_value() for name, value in self.entries.items()}

    def check(self) -> str:
        """Says which names graders will find.

        Raises:
            ConfigError: see `environment`; or an entry is empty.
        """
        empty = [name for name, value in self.environment().items() if not value]
        if empty:
            raise ConfigError(f"grader secrets without a value: {', '.join(empty)}")
        return f"graders find {', '.join(self.entries) or 'nothing'}"
