"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any

from slime_core.errors import SlimeError

CONTEXT_LENGTH = "context_length_exceeded"


class ApiError(SlimeError):
    """An answer to an agent that is an error.

    Attributes:
        status: HTTP status. Clients try 408, 409, 429 and those from 500 again by themselves.
        code: OpenAI's short name of what is wrong.
        param: the field of the request that it is about.
    """

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, self.message), self.__dict__

    def body(self) -> dict[str, Any]:
        """What the client gets."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        about = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": about}


def refused(param: str, message: str) -> ApiError:
    """A field of a request that cannot be served as it is."""
    return ApiError(400, message, code="invalid_value", param=param)
