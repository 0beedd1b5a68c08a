"""Token in, token out: brings samples to their end through the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime_core.data.render import render_chat
from slime_core.engines.client import EngineAnswerError, EngineUnreachableError
from slime_core.engines.media import media_fields
from slime_core.engines.protocol import GenerateRequest, GenerateResult
from slime_core.errors import DataError, DeadlineError
from slime_core.rollout.gate import EngineGate
from slime_core.rollout.routed import RouteAsk
from slime_core.sample import Sample, Status
from slime_core.waits import Deadline, within

SERVER_ERROR = 500  # HTTP status from which the engine failed, not the request
OPEN_STATES = (Status.PENDING, Status.ABORTED)


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled.

    Attributes:
        max_response_tokens: over all continuations of a sample.
        params: SGLang's sampling parameters, without max_new_tokens and the seed.
        timeout_s: from the first request of a call to the end of its last.
        max_context_tokens: over prompt and response, None for no such limit.
        routes: where engines are asked for the experts of each token.
    """

    max_response_tokens: int
    params: dict[str, Any]
    timeout_s: float
    max_context_tokens: int | None = None
    routes: RouteAsk | None = None

    def left(self, sample: Sample) -> int:
        """Tokens that a sample may still grow by; below 1 there is no room."""
        room = self.max_response_tokens - sample.response_length
        if self.max_context_tokens is not None:
            room = min(room, self.max_context_tokens - len(sample.tokens))
        return room


async def generate(
    samples: Sequence[Sample],
    gate: EngineGate,
    sampling: Sampling,
    seed_of: Callable[[Sample], int],
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Generates until every sample is completed or truncated; changes them in place.

    A request that a weight sync aborts keeps its tokens (span of the old version) and continues
    under the new one. An engine that fails or hangs is marked down for the supervisor to look at;
    after a failure the request goes to another one with the same seed.

    Args:
        samples: with prompt tokens in `tokens`; all go out in one request.
        seed_of: seed of a sample's next request; counts what it has already.
        stopping: once it says so no request leaves any more, and samples stay as they are.

    Raises:
        EngineError: an engine refused the request itself (not a failure of the engine).
        DeadlineError: not done within `sampling.timeout_s`.
    """
    deadline = Deadline(f"generation of {_named(samples)}", sampling.timeout_s)
    while waiting := [s for s in samples if _needs_tokens(s, sampling)]:
        if stopping():
            return
        deadline.check()
        continues = any(sample.response_length for sample in waiting)
        engine = gate.engine(len(waiting), deadline.remaining_s, continues=continues)
        async with engine as client:
            if stopping():
                return
            requests = _requests(waiting, sampling, seed_of)
            try:
                asked = client.generate_unread(requests)
                answer = await within(deadline.name, deadline.remaining_s, asked)
            except (EngineUnreachableError, EngineAnswerError, DeadlineError) as error:
                if isinstance(error, EngineAnswerError) and error.status < SERVER_ERROR:
                    raise
                await gate.mark_down(client, str(error))
                if isinstance(error, DeadlineError):
                    raise
                continue
        _append(waiting, answer.read(), sampling.routes, requests[0].extra)


def _requests(
    waiting: Sequence[Sample], sampling: Sampling, seed_of: Callable[[Sample], int]
) -> list[GenerateRequest]:
    """One for each of the samples that wait."""
    extra = {} if sampling.routes is None else sampling.routes.fields(waiting)
    return [
        GenerateRequest(
            sample.tokens,
            {
                **sampling.params,
                "max_new_tokens": sampling.left(sample),
                "sampling_seed": seed_of(sample),
            },
            extra=extra,
            media=media_fields(sample.multimodal_inputs),
        )
        for sample in waiting
    ]


def _append(
    waiting: Sequence[Sample],
    results: Sequence[GenerateResult],
    routes: RouteAsk | None,
    asked: dict[str, Any],
) -> None:
    """
    Args:
        asked: what the request had besides.
    """
    for sample, result in zip(waiting, results, strict=True):
        meta = result.meta if routes is None else routes.told(sample, asked, result.meta)
        sample.append_response_tokens(
            routes, tokens=result.tokens, log_probs=result.log_probs, meta_info=meta
        )


def _needs_tokens(sample: Sample, sampling: Sampling) -> bool:
    if sample.status not in OPEN_STATES:
        return False
    if sampling.left(sample) < 1:
        sample.status = Status.TRUNCATED
        return False
    return True


def tokenize_prompt(sample: Sample, tokenizer: Any, *, chat: bool = False) -> None:
    """Puts the prompt's token ids into `tokens`, once.

    Args:
        chat: a prompt of messages is rendered (a generate function wants it as messages).

    Raises:
        DataError: the prompt has no tokens.
    """
    if sample.tokens:
        return
    text = sample.prompt
    if not isinstance(text, str) and chat:
        tools, options = sample.metadata.get("tools"), sample.apply_chat_template_kwargs
        text = render_chat(tokenizer, text, tools=tools, template_kwargs=options)
    if not isinstance(text, str):
        raise DataError(
            f"group {sample.group_index}: the prompt is a list of messages; set "
            "apply_chat_template to render it"
        )
    sample.tokens = list(tokenizer.encode(text, add_special_tokens=False))
    if not sample.tokens:
        raise DataError(f"group {sample.group_index}: the prompt has no tokens")


def decode_response(sample: Sample, tokenizer: Any, skip_special_tokens: bool) -> None:
    """Sets the response text from the response tokens (never from pieces of text, which may cut a
    character in two)."""
    if sample.response_length:
        # transformers looks at each element of a list, in Python.
        ids = np.asarray(sample.tokens[-sample.response_length :])
        sample.response = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def _named(samples: Sequence[Sample]) -> str:
    groups = sorted({s.group_index for s in samples if s.group_index is not None})
    if len(groups) > 1:
        return f"groups {groups[0]} to {groups[-1]}"
    return f"group {groups[0] if groups else '?'}"
