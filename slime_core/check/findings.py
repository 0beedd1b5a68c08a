"""What a check collects: problems that stop a run, notes, and facts for the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slime_core.errors import ConfigError, SlimeError

T = TypeVar("T")


@dataclass
class Findings:
    """Collected while everything is looked at.

    Attributes:
        problems: what stops the run, each a sentence with the fix.
        notes: what is worth knowing.
        facts: section -> name -> value, for the report; values are plain JSON.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def problem(self, sentence: str) -> None:
        """Adds a problem, once."""
        if sentence not in self.problems:
            self.problems.append(sentence)

    def attempt(self, call: Callable[[], T], about: str = "") -> T | None:
        """The call's value, or None where it raised an error of ours, which becomes a problem.

        Args:
            about: the field that the call looks at, where its errors do not name it.
        """
        try:
            return call()
        except SlimeError as error:
            self.problem(f"{about}: {error}" if about else str(error))
            return None

    def fact(self, section: str, **values: Any) -> None:
        """Adds facts to a section of the report."""
        self.facts.setdefault(section, {}).update(values)

    def raise_problems(self) -> None:
        """Raises ConfigError with all problems, if there are any."""
        if len(self.problems) == 1:
            raise ConfigError(self.problems[0])
        if self.problems:
            listed = "\n".join(f"  - {text}" for text in self.problems)
            raise ConfigError(f"{len(self.problems)} problems, so nothing was started:\n{listed}")
