"""One sample on its way through the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime_core.engines.embedded.sampling_params import SamplingParams

TopList = list[tuple[float, int]]


@dataclass(frozen=True)
class LogProbAsk:
    """Which log-probs a request wants back.

    Attributes:
        wanted: output_token_logprobs (and all else here) are returned.
        start: first prompt position of input_token_logprobs; -1 for none.
        top: alternatives per position.
        token_ids: tokens whose log-prob is returned at each position.
    """

    wanted: bool = False
    start: int = -1
    top: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(eq=False)
class Request:
    """A prompt, what was sampled for it so far, and how it ended.

    Lists only grow, so that the HTTP side may read a prefix while the engine appends.

    Attributes:
        seed: fully derived; two requests with one prompt, seed and weights give one sample.
        limit: output tokens at most.
        output: sampled token ids, the stop token included.
        log_probs: natural log, one per output token, of the distribution after temperature and
            before top-k, top-p and min-p (what SGLang 0.5 returns).
        finish: SGLang's finish_reason object once ended.
        weight_version: the engine's version when the request ended.
        routes_from: first token whose experts are wanted; None for none.
        routes: experts of all tokens that were fed, int32 [tokens, layers, k] in pieces; nothing
            where they are not wanted.
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int
    ask: LogProbAsk = LogProbAsk()
    stream: bool = False
    output: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    output_top: list[TopList] = field(default_factory=list)
    output_ids_logprobs: list[list[float]] = field(default_factory=list)
    input_log_probs: list[float] | None = None
    input_top: list[TopList] = field(default_factory=list)
    input_ids_logprobs: list[list[float]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    weight_version: str = ""
    routes_from: int | None = None
    routes: list[np.ndarray] = field(default_factory=list)
    cached_tokens: int = 0
    retractions: int = 0
    arrived_s: float = field(default_factory=time.perf_counter)
    started_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of the sequence so far; the next sampled token gets this position."""
        return len(self.prompt) + len(self.output)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output if self.output else self.prompt

    @property
    def newest(self) -> int:
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def scores_prompt(self) -> bool:
        """True while the prompt's own log-probs are still to be computed."""
        return self.ask.start >= 0 and self.input_log_probs is None

    def abort(self, message: str = "Aborted", status: int | None = None) -> None:
        """Ends the request as SGLang ends an aborted one."""
        self.finish = {
            "type": "abort",
            "message": message,
            "status_code": status,
            "err_type": None if status is None else "InternalServerError",
        }
