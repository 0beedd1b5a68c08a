"""Errors that the embedded engine answers over HTTP."""

from __future__ import annotations

from slime_core.errors import EngineError


class RefusedRequestError(EngineError):
    """A request that cannot be served as it stands; answered with `status` and the message."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class RefusedWeightsError(EngineError):
    """A weight update that was refused before any parameter changed."""
