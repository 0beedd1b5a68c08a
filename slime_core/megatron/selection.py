"""Which parameters are trained, by patterns over their names. Without torch and megatron."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slime_core.errors import ConfigError

_OF_EXPERT = re.compile(r"\.local_experts\.\d+")


def trained_names(
    names: Sequence[str], only: Sequence[str] | None, frozen: Sequence[str] | None
) -> set[str]:
    """The names of the parameters to train.

    Args:
        names: of all parameters of the model, Megatron's, with layers numbered over the whole
            model: the choice does not depend on a layout.
        only: patterns (re.search) of which one must fit; None takes all.
        frozen: patterns of which none may fit.

    Raises:
        ConfigError: a pattern is no regular expression or fits no parameter, or none is left.
    """
    found = set(names)
    if only:
        field = "only_train_params_name_list"
        found = {name for one in only for name in _fitting(names, one, field)}
    for one in frozen or ():
        found -= _fitting(names, one, "freeze_params_name_list")
    _together(names, found)
    if not found:
        raise ConfigError(
            "only_train_params_name_list and freeze_params_name_list leave no parameter to train"
        )
    return found


def _fitting(names: Sequence[str], pattern: str, field: str) -> set[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{field}: {pattern!r} is no regular expression: {error}") from error
    found = {name for name in names if compiled.search(name)}
    if not found:
        raise ConfigError(
            f"{field}: {pattern!r} fits no parameter; the model has such as {', '.join(names[1:4])}"
        )
    return found


def _together(names: Sequence[str], found: set[str]) -> None:
    """Refuses a choice among the experts of a layer, which lie on different ranks."""
    first: dict[str, str] = {}
    for name in names:
        if not _OF_EXPERT.search(name):
            continue
        other = first.setdefault(_OF_EXPERT.sub("", name), name)
        if (name in found) != (other in found):
            raise ConfigError(
                "only_train_params_name_list and freeze_params_name_list choose among the experts "
                f"of a layer, such as {name} and {other}: choose all or none, since they lie on "
                "different ranks"
            )
