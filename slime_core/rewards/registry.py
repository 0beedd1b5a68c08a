"""The built-in graders by name, and the digest that says which code gave a reward."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError
from slime_core.near import nearest

GradeFunction = Callable[[str, str | None, dict[str, Any]], Any]
PACKAGE = "slime_core.rewards"
BOXED = "boxed_"
REWARD_NAMES = ("reward_func", "batched_custom_rm")
"""Names that a function for grading usually has, where a file is given alone."""
ANY_LENGTH, SHORT = 1 << 62, 2048
MATH = ("math_expr", "math_text", "text")


@dataclass(frozen=True)
class Grader:
    """A built-in grader: `function(response, label, metadata) -> float or dict`.

    Attributes:
        name: what `--rm-type` says.
        target: `module:function` within slime_core.rewards.
        uses: further modules whose code decides the score; they enter the digest.
        inline_chars: responses up to this length need no worker process, so simple is it.
        needs_label: a sample without label (or metadata["answer"]) fails.
        requires: `module:function` that raises ConfigError where something is missing that it
            needs.
    """

    name: str
    target: str
    uses: tuple[str, ...] = ()
    inline_chars: int = 0
    needs_label: bool = True
    requires: str = ""

    @property
    def digest(self) -> str:
        """sha256 (hex) over name and source."""
        return _digest(self)

    def function(self) -> GradeFunction:
        """Imports the grader; heavy ones only in worker processes."""
        return _imported(self.target)

    def check(self) -> None:
        """Raises ConfigError where it cannot work on this machine."""
        if self.requires:
            _imported(self.requires)()


GRADERS = {
    grader.name: grader
    for grader in (
        Grader("exact_match", "exact:grade_exact_match", ("text",), inline_chars=ANY_LENGTH),
        Grader("random", "exact:grade_random", inline_chars=ANY_LENGTH, needs_label=False),
        Grader("math", "math_grade:grade_math", MATH),
        Grader("deepscaler", "math_grade:grade_deepscaler", MATH),
        Grader("hendrycks_math", "math_grade:grade_hendrycks_math", MATH),
        Grader("math_verify", "math_equiv:grade_math_verify", MATH),
        Grader("dapo", "dapo:grade_dapo", ("math_text",)),
        Grader("gsm8k", "gsm8k:grade_gsm8k"),
        Grader("gsm8k_strict", "gsm8k:grade_gsm8k_strict"),
        Grader("gsm8k_flexible", "gsm8k:grade_gsm8k_flexible"),
        Grader("f1", "qa:grade_f1", ("text",), inline_chars=SHORT),
        Grader("ifeval", "ifeval:grade_ifeval", ("text",), needs_label=False),
        Grader("ifbench", "ifbench:grade_ifbench", ("ifeval", "text"), needs_label=False),
        Grader("regex", "patterns:grade_regex", needs_label=False),
        Grader("json_schema", "patterns:grade_json_schema", ("text",), needs_label=False),
        Grader(
            "code", "code:grade_code", ("text",), needs_label=False, requires="code:require_sandbox"
        ),
        Grader(
            "code_share",
            "code:grade_code_share",
            ("text",),
            needs_label=False,
            requires="code:require_sandbox",
        ),
        Grader(
            "reasoning_gym",
            "reasoning:grade_reasoning_gym",
            ("text",),
            needs_label=False,
            requires="reasoning:require_library",
        ),
        Grader("gpqa", "choices:grade_gpqa", ("math_text", "text")),
    )
}


def grader_named(name: str) -> Grader:
    """Raises ConfigError, with the nearest name, for an unknown grader."""
    if name in GRADERS:
        return GRADERS[name]
    close = nearest(name, GRADERS)
    hint = f"did you mean {close}? " if close else ""
    raise ConfigError(f"unknown --rm-type {name!r}; {hint}known: {', '.join(sorted(GRADERS))}")


def _imported(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)


@lru_cache(maxsize=256)
def _digest(grader: Grader) -> str:
    total = hashlib.sha256(f"{grader.name}\n{grader.target}\n".encode())
    for module in (grader.target.partition(":")[0], *grader.uses):
        spec = importlib.util.find_spec(f"{PACKAGE}.{module}")
        if spec is None or spec.origin is None:
            raise ConfigError(f"grader {grader.name}: no module {PACKAGE}.{module}")
        total.update(Path(spec.origin).read_bytes())
    return total.hexdigest()
