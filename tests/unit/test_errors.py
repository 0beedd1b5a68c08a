"""Every error keeps its type and sentence on its way out of the process that raised it."""

import importlib
import pickle
from collections.abc import Iterator

import pytest

from slime_core.agents.errors import ApiError
from slime_core.engines.client import EngineAnswerError, EngineDeadlineError, EngineUnreachableError
from slime_core.errors import SlimeError

ARGUMENTS = {
    ApiError: (429, "too many requests"),
    EngineAnswerError: ("http://a/generate", 503, "no memory"),
    EngineUnreachableError: ("http://a", "broken pipe"),
    EngineDeadlineError: ("http://a", 3.0),
}
LIGHT = (
    "errors",
    "agents.errors",
    "engines.client",
    "engines.tensor_wire",
    "engines.embedded.errors",
)


def subclasses(kind: type[SlimeError]) -> Iterator[type[SlimeError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from subclasses(child)


def all_errors() -> list[type[SlimeError]]:
    for name in LIGHT:
        importlib.import_module(f"slime_core.{name}")
    return sorted(set(subclasses(SlimeError)), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", all_errors(), ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling(kind):
    error = kind(*ARGUMENTS.get(kind, ("a sentence that says what to do",)))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind and str(copy) == str(error) and len(str(copy)) > 10
    assert vars(copy) == vars(error)
