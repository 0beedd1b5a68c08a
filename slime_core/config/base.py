"""What every group of the configuration tree shares: frozen models and the classes of fields.

A field's class says what may happen to it when a run is resumed:
identity (another value is another run), numeric (takes effect from the next iteration and enters
the state digest) or operational (free).
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict

T = TypeVar("T")
Identity = Annotated[T, "identity"]
Numeric = Annotated[T, "numeric"]
Operational = Annotated[T, "operational"]


class Group(BaseModel):
    """A frozen group of fields that refuses unknown keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )
