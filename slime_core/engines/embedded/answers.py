"""The JSON that SGLang answers with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from slime_core.engines.embedded.request import Request, TopList
from slime_core.engines.embedded.routed import as_text
from slime_core.engines.embedded.stopping import Decode, visible_text


def answer(request: Request, count: int, decode: Decode) -> dict[str, Any]:
    """The object for one sample, complete or, in a stream, as far as `count` tokens.

    Args:
        count: output tokens to show; the engine may be ahead of a stream.
    """
    done = request.finish is not None and count == len(request.output)
    tokens = request.output[:count]
    if done:
        text = visible_text(request, tokens, decode)
    else:
        # A character cut in half decodes to this mark; the next token completes it.
        text = decode(tokens, request.params.skip_special_tokens).rstrip("\ufffd")
    return {"text": text, "output_ids": tokens, "meta_info": _meta(request, count, done)}


def _meta(request: Request, count: int, done: bool) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish if done else None,
        "prompt_tokens": len(request.prompt),
        "weight_version": request.weight_version,
        "num_retractions": request.retractions,
    }
    if request.routes_from is not None and request.routes:
        fed = len(request.prompt) + count - 1
        meta["routed_experts"] = as_text(request.routes, request.routes_from, fed)
    if request.ask.wanted:
        meta.update(_log_probs(request, count))
    meta.update(
        reasoning_tokens=0,
        completion_tokens=count,
        cached_tokens=request.cached_tokens,
        cached_tokens_details=None,
        dp_rank=None,
    )
    if done:
        meta["e2e_latency"] = request.ended_s - request.arrived_s
    meta["response_sent_to_client_ts"] = time.time()
    return meta


def _log_probs(request: Request, count: int) -> dict[str, Any]:
    output = zip(request.log_probs[:count], request.output[:count], strict=True)
    fields: dict[str, Any] = {
        "input_token_logprobs": _input(request),
        "output_token_logprobs": [[log_prob, token, None] for log_prob, token in output],
        "output_token_logprobs_length": count,
    }
    scored = bool(fields["input_token_logprobs"])
    if request.ask.top:
        fields["input_top_logprobs"] = [None, *map(_top, request.input_top)] if scored else []
        fields["output_top_logprobs"] = [_top(row) for row in request.output_top[:count]]
    if request.ask.token_ids:
        inputs = [_chosen(request, row) for row in request.input_ids_logprobs]
        fields["input_token_ids_logprobs"] = [None, *inputs] if scored else []
        outputs = request.output_ids_logprobs[:count]
        fields["output_token_ids_logprobs"] = [_chosen(request, row) for row in outputs]
    return fields


def _input(request: Request) -> list[list[Any]]:
    """The first position has no context and so no log-prob; SGLang leaves it null."""
    if request.input_log_probs is None:
        return []
    tokens = request.prompt[request.ask.start :]
    values = [None, *request.input_log_probs]
    return [[value, token, None] for value, token in zip(values, tokens, strict=True)]


def _top(row: TopList) -> list[list[Any]]:
    return [[log_prob, token, None] for log_prob, token in row]


def _chosen(request: Request, row: Sequence[float]) -> list[list[Any]]:
    return [[value, token, None] for value, token in zip(row, request.ask.token_ids, strict=True)]
