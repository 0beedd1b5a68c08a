"""When a sample ends, in SGLang's order: length, end tokens, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slime_core.engines.embedded.request import Request

Decode = Callable[[Sequence[int], bool], str]
"""Token ids and skip_special_tokens to text."""


class StopRules:
    """Checks requests after each token.

    Attributes:
        end_ids: the model's own end tokens.
    """

    def __init__(self, end_ids: frozenset[int], decode: Decode) -> None:
        self.end_ids = end_ids
        self._decode = decode

    def check(self, request: Request) -> dict[str, Any] | None:
        """The finish_reason after the newest token, or None to go on."""
        params = request.params
        if len(request.output) >= request.limit:
            return {"type": "length", "length": request.limit}
        newest = request.output[-1]
        if not params.ignore_eos and (newest in self.end_ids or newest in params.stop_token_ids):
            return {"type": "stop", "matched": newest}
        for stop in params.stop:
            if stop in self._tail(request, stop):
                return {"type": "stop", "matched": stop}
        return None

    def _tail(self, request: Request, stop: str) -> str:
        """Text of the last tokens, as many as could hold the stop string (a byte a token)."""
        tokens = request.output[-(len(stop.encode()) + 1) :]
        return self._decode(tokens, request.params.skip_special_tokens)


def visible_text(request: Request, tokens: Sequence[int], decode: Decode) -> str:
    """Text of a sample, without the stop that ended it unless no_stop_trim is set."""
    params = request.params
    matched = (request.finish or {}).get("matched")
    if matched is None or params.no_stop_trim:
        return decode(tokens, params.skip_special_tokens)
    if isinstance(matched, int):
        return decode(tokens[:-1], params.skip_special_tokens)
    text = decode(tokens, params.skip_special_tokens)
    end = text.find(matched)
    return text if end < 0 else text[:end]
