"""The graders `regex` and `json_schema`: does a response have a form?"""

from __future__ import annotations

import re
from typing import Any

from slime_core.errors import RewardError
from slime_core.rewards.text import after_thinking
from slime_core.untrusted_json import read_json

FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def grade_regex(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 where the pattern of metadata["pattern"], else of the label, is found in the response.

    `^`, `$` and flags such as `(?s)` stand in the pattern itself.

    Raises:
        RewardError: there is no pattern, or it is none.
    """
    pattern = metadata.get("pattern") or label
    if not pattern:
        raise RewardError("regex needs a pattern: metadata['pattern'] or the label")
    try:
        return float(re.search(str(pattern), response) is not None)
    except re.error as error:
        raise RewardError(f"{pattern!r} is no regular expression: {error}") from error


def grade_json_schema(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1.0 where the response is JSON that metadata["schema"], else the schema in the label, allows.

    What follows the reasoning counts: the last fenced block, or else all of it.

    Raises:
        RewardError: there is no schema, or it is none.
    """
    from jsonschema import ValidationError

    schema = metadata.get("schema") or label
    validator = _validator(schema)
    text = after_thinking(response)
    fenced = FENCE.findall(text)
    try:
        value = read_json(fenced[-1] if fenced else text)
    except ValueError:
        return 0.0
    try:
        validator.validate(value)
    except ValidationError:
        return 0.0
    return 1.0


def _validator(schema: Any) -> Any:
    """Raises RewardError for what is no schema, or refers to others."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    if isinstance(schema, str):
        try:
            schema = read_json(schema)
        except ValueError as error:
            raise RewardError(f"the schema is not JSON: {error}") from error
    if not isinstance(schema, (dict, bool)):
        raise RewardError("json_schema needs a schema: metadata['schema'] or JSON in the label")
    kind: Any = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise RewardError(f"the schema is none: {error.message}") from error
    return kind(schema, registry=Registry())  # an empty one: nothing is fetched
