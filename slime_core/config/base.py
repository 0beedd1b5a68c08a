"""What every group of the configuration tree shares: frozen models and the classes of fields.

A field's class says what may happen to it when a run is resumed:
identity (another value is another run), numeric (takes effect from the next iteration and enters
the state digest) or operational (free).
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from slime_core.config.expected import members

T = TypeVar("T")
Identity = Annotated[T, "identity"]
Numeric = Annotated[T, "numeric"]
Operational = Annotated[T, "operational"]


MOST_INTEGER = 2**53 - 1
"""Beyond it, readers of JSON see another number."""


class Group(BaseModel):
    """A frozen group of fields that refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plain_value(cls, value: Any, info: ValidationInfo) -> Any:
        """`true` is no 1, and no path or name has a zero byte, which the system would stop at."""
        if isinstance(value, str) and "\0" in value:
            raise PydanticCustomError("zero_byte", "a text with a zero byte")
        if isinstance(value, bool) and info.field_name is not None:
            kinds = set(members(cls.model_fields[info.field_name].annotation))
            if kinds & {int, float} and bool not in kinds:
                raise PydanticCustomError("switch", "a switch where a number belongs")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _fits(cls, value: Any) -> Any:
        """The configuration goes through JSON: forms, run.json, MLflow."""
        if isinstance(value, int) and abs(value) > MOST_INTEGER:
            raise PydanticCustomError("integer_size", "beyond what JSON holds")
        return value
