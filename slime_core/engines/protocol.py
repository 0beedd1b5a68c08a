"""SGLang's HTTP protocol as plain data: request bodies out, results in. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slime_core.errors import EngineError

PauseMode = Literal["abort", "retract", "in_place"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")


@dataclass(frozen=True)
class GenerateRequest:
    """One sample to generate.

    Attributes:
        tokens: prompt token ids (for a continuation: prompt and what was sampled so far).
        sampling: SGLang's sampling_params, for example {"max_new_tokens": 64, "temperature": 1}.
        rid: id under which it can be aborted; the engine makes one up when None.
        logprob_start: first prompt position whose log-prob is wanted; -1 for output only.
        top_logprobs: alternatives per position.
        extra: further fields of SGLang's request, passed on as they are.
        media: fields of its own that carry pictures and the like (see media.py).
    """

    tokens: Sequence[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    rid: str | None = None
    logprob_start: int = -1
    top_logprobs: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    media: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerateResult:
    """What an engine made of one request.

    Attributes:
        tokens: sampled ids, the stop token included.
        log_probs: natural log, one per token, after temperature and before top-k, top-p, min-p.
        finish_type: "stop", "length" or "abort"; None in the middle of a stream.
        matched: the stop token id or string.
        weight_version: the version at the *end* of the request.
        cached_tokens: prompt tokens that were not computed again.
        prompt_log_probs: log-probs of the prompt tokens behind logprob_start, at temperature 1;
            empty when not asked for.
        meta: SGLang's whole meta_info.
    """

    rid: str
    tokens: list[int]
    log_probs: list[float]
    text: str
    finish_type: str | None
    matched: int | str | None
    weight_version: str
    prompt_tokens: int
    cached_tokens: int
    prompt_log_probs: list[float]
    meta: dict[str, Any]


@dataclass(frozen=True)
class Unread:
    """The answer to a batch as it came: its engine is done with it.

    Attributes:
        read: makes a result of each request; raises EngineError for a malformed answer.
    """

    read: Callable[[], list[GenerateResult]]


@dataclass(frozen=True)
class UpdateResult:
    """The answer to a weight update."""

    success: bool
    message: str


def generate_body(request: GenerateRequest, stream: bool = False) -> dict[str, Any]:
    """The body of /generate for one sample."""
    body: dict[str, Any] = {
        "input_ids": list(request.tokens),
        "sampling_params": request.sampling,
        "return_logprob": True,
        "logprob_start_len": request.logprob_start,
        "stream": stream,
        **request.extra,
        **request.media,
    }
    if request.top_logprobs:
        body["top_logprobs_num"] = request.top_logprobs
    if request.rid is not None:
        body["rid"] = request.rid
    return body


def batch_body(requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """The body of /generate for several samples in one call.

    Raises:
        EngineError: no request, some with and some without an id, or different `extra`.
    """
    if not requests:
        raise EngineError("a generate batch must hold at least one request")
    named = [request.rid for request in requests if request.rid is not None]
    if named and len(named) != len(requests):
        raise EngineError("a generate batch must give an id to all of its requests or to none")
    if any(request.extra != requests[0].extra for request in requests):
        raise EngineError("all requests of a generate batch must have the same extra fields")
    body: dict[str, Any] = {
        "input_ids": [list(request.tokens) for request in requests],
        "sampling_params": [request.sampling for request in requests],
        "return_logprob": [True] * len(requests),
        "logprob_start_len": [request.logprob_start for request in requests],
        "top_logprobs_num": [request.top_logprobs for request in requests],
        "stream": False,
        **requests[0].extra,
    }
    for name in {name for request in requests for name in request.media}:
        body[name] = [request.media.get(name, []) for request in requests]
    if named:
        body["rid"] = named
    return body


def parse_result(answer: Any) -> GenerateResult:
    """Reads one object of an answer of /generate.

    Raises:
        EngineError: it does not look like SGLang's, or log-probs and tokens do not match.
    """
    try:
        meta = answer["meta_info"]
        tokens = [int(token) for token in answer["output_ids"]]
        pairs = meta.get("output_token_logprobs") or []
        finish = meta["finish_reason"] or {}
        if not finish or not tokens:
            # SGLang's list of a stream's log-probs may be ahead of its tokens, and a prompt that
            # is only scored has one of a token that is not given if others were computed with it.
            pairs = pairs[: len(tokens)]
        result = GenerateResult(
            rid=str(meta["id"]),
            tokens=tokens,
            log_probs=_all_finite([pair[0] for pair in pairs]),
            text=str(answer.get("text") or ""),
            finish_type=finish.get("type"),
            matched=finish.get("matched"),
            weight_version=str(meta.get("weight_version") or ""),
            prompt_tokens=int(meta.get("prompt_tokens") or 0),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            prompt_log_probs=_all_finite(
                [pair[0] for pair in (meta.get("input_token_logprobs") or [])[1:]]
            ),
            meta=meta,
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise EngineError(f"not an answer of /generate ({error!r}): {str(answer)[:200]}") from error
    if [pair[1] for pair in pairs] != tokens:
        raise EngineError(
            f"request {result.rid}: {len(tokens)} output tokens do not match the "
            f"{len(pairs)} tokens that have log-probs"
        )
    return result


def _all_finite(values: list[Any]) -> list[float]:
    if None in values:
        raise ValueError("a log-prob is null: the engine's logits are not finite")
    return list(map(float, values))


def pause_body(mode: PauseMode) -> dict[str, Any]:
    if mode not in PAUSE_MODES:
        raise EngineError(f"pause mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
    return {"mode": mode}


def disk_update_body(path: str, version: str, flush_cache: bool) -> dict[str, Any]:
    """The body of /update_weights_from_disk.

    With flush_cache (SGLang's own default) an engine that holds requests ends itself.
    """
    return {
        "model_path": path,
        "weight_version": version,
        "flush_cache": flush_cache,
        "abort_all_requests": False,
    }


def tensor_update_body(
    payloads: Sequence[str],
    version: str | None,
    flush_cache: bool,
    load_format: str | None,
) -> dict[str, Any]:
    """The body of /update_weights_from_tensor.

    Args:
        payloads: one per tensor-parallel rank of the engine (engines/tensor_wire.py).
        version: None for all buckets but the last.
        load_format: None or "flattened_bucket".
    """
    return {
        "serialized_named_tensors": list(payloads),
        "load_format": load_format,
        "weight_version": version,
        "flush_cache": flush_cache,
        "abort_all_requests": False,
    }


def error_message(body: Any) -> str:
    """The sentence inside an error answer, whatever its shape."""
    if isinstance(body, dict):
        error = body.get("error")
        if isinstance(error, dict):
            error = error.get("message")
        for value in (error, body.get("message"), body.get("detail")):
            if isinstance(value, str) and value:
                return value
    return str(body)[:500]
