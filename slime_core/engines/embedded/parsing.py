"""From the JSON of /generate to requests: SGLang's shapes, defaults and refusals."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from slime_core.engines.embedded.errors import RefusedRequestError
from slime_core.engines.embedded.request import LogProbAsk, Request
from slime_core.engines.embedded.sampling_params import DEFAULT_MAX_NEW_TOKENS, SamplingParams

SeedSource = Callable[[], int]
SEED_MASK = 2**64 - 1
MAX_TOP_LOGPROBS = 1000


@dataclass(frozen=True)
class ModelLimits:
    """What a request is checked against. `routes`: experts of tokens are kept."""

    vocab_size: int
    context_length: int
    routes: bool = False


@dataclass(frozen=True)
class GenerateCall:
    """One HTTP call to /generate.

    Attributes:
        requests: one per sample, prompt by prompt, then sample by sample.
        single: the answer is an object, not a list.
        rids: ids as the caller knows them, for an abort when the caller goes away.
    """

    requests: list[Request]
    single: bool
    stream: bool

    @property
    def rids(self) -> list[str]:
        return [request.rid for request in self.requests]


def parse_generate(
    body: Any, limits: ModelLimits, encode: Callable[[str], list[int]], new_seed: SeedSource
) -> GenerateCall:
    """Reads the body of /generate. Unknown fields are accepted: routers add many.

    Args:
        body: decoded JSON.
        encode: text to token ids.
        new_seed: seeds for requests that bring none.

    Raises:
        RefusedRequestError: something SGLang answers 400 to.
    """
    if not isinstance(body, dict):
        raise RefusedRequestError(f"the body must be a JSON object, got {type(body).__name__}")
    prompts, batched = _prompts(body, encode)
    count = len(prompts)
    for prompt in prompts:
        _check_prompt(prompt, limits)
    params = [SamplingParams.from_json(item) for item in _spread(body, "sampling_params", count)]
    samples = {item.n for item in params}
    if len(samples) > 1:
        raise RefusedRequestError("sampling_params.n must be equal for all prompts of a batch")
    rids = _rids(body.get("rid"), count, batched)
    asks = [_ask(*values) for values in zip(*_ask_fields(body, count, batched), strict=True)]
    stream = _boolean(body.get("stream"), "stream")
    routes_from = _routes_from(body, limits, min(map(len, prompts)))
    requests = []
    for prompt, param, rid, ask in zip(prompts, params, rids, asks, strict=True):
        limit = _limit(prompt, param, limits)
        for sample in range(param.n):
            requests.append(
                Request(
                    rid=rid if param.n == 1 else f"{rid}_{sample}",
                    prompt=prompt,
                    params=param,
                    seed=_seed(param.sampling_seed, sample, new_seed),
                    limit=limit,
                    ask=ask,
                    stream=stream,
                    routes_from=routes_from,
                )
            )
    for request in requests:
        _check_ask(request, limits)
    return GenerateCall(requests, not batched and len(requests) == 1, stream)


def _prompts(body: dict[str, Any], encode: Callable[[str], list[int]]) -> tuple[list, bool]:
    """Token ids per prompt, and whether the call is a batch."""
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise RefusedRequestError("either text or input_ids must be given")
    if text is not None:
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
            raise RefusedRequestError("text must be a string or a list of strings")
        prompts, batched = [encode(item) for item in texts], not isinstance(text, str)
    else:
        if not isinstance(ids, list):
            raise RefusedRequestError("input_ids must be a list of token ids, or a list of lists")
        batched = bool(ids) and isinstance(ids[0], list)
        prompts = ids if batched else [ids]
    if not prompts:
        raise RefusedRequestError("a batch must hold at least one prompt")
    return prompts, batched


def _check_prompt(prompt: Any, limits: ModelLimits) -> None:
    if not isinstance(prompt, list) or not set(map(type, prompt)) <= {int}:
        raise RefusedRequestError("input_ids must be a list of token ids, or a list of lists")
    if not prompt:
        raise RefusedRequestError("the prompt is empty: input_ids must hold at least one token")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        raise RefusedRequestError(
            f"input_ids must be from 0 to {limits.vocab_size - 1} (the vocabulary), got "
            f"{min(prompt) if min(prompt) < 0 else max(prompt)}"
        )
    if len(prompt) >= limits.context_length:
        raise RefusedRequestError(
            f"the input ({len(prompt)} tokens) is longer than the model's context length "
            f"({limits.context_length} tokens)"
        )


def _limit(prompt: list[int], params: SamplingParams, limits: ModelLimits) -> int:
    """Output tokens at most. SGLang refuses what cannot fit and cuts only its own default."""
    asked = params.max_new_tokens
    if asked is None:
        return min(DEFAULT_MAX_NEW_TOKENS, limits.context_length - len(prompt) - 1)
    if len(prompt) + asked >= limits.context_length:
        raise RefusedRequestError(
            f"the input ({len(prompt)} tokens) and max_new_tokens {asked} together exceed the "
            f"model's context length ({limits.context_length} tokens)"
        )
    return asked


def _spread(body: dict[str, Any], name: str, count: int) -> list[Any]:
    """One value per prompt from a single value or a list."""
    value = body.get(name)
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RefusedRequestError(f"{name} has {len(value)} entries for {count} prompts")
    return value


def _ask_fields(body: dict[str, Any], count: int, batched: bool) -> list[list[Any]]:
    names = ("return_logprob", "logprob_start_len", "top_logprobs_num")
    columns = [_spread(body, name, count) for name in names]
    ids = body.get("token_ids_logprob")
    nested = (
        batched and isinstance(ids, list) and bool(ids) and isinstance(ids[0], (list, type(None)))
    )
    return [*columns, _spread(body, "token_ids_logprob", count) if nested else [ids] * count]


def _ask(wanted: Any, start: Any, top: Any, token_ids: Any) -> LogProbAsk:
    if not _boolean(wanted, "return_logprob"):
        return LogProbAsk()
    start = -1 if start is None else start
    top = 0 if top is None else top
    if type(start) is not int or start < -1:
        raise RefusedRequestError(f"logprob_start_len must be -1 or more, got {start!r}")
    if type(top) is not int or not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RefusedRequestError(
            f"top_logprobs_num must be from 0 to {MAX_TOP_LOGPROBS}, got {top!r}"
        )
    ids = token_ids or ()
    if not isinstance(ids, (list, tuple)) or not all(type(i) is int and i >= 0 for i in ids):
        raise RefusedRequestError(f"token_ids_logprob must be a list of token ids, got {ids!r}")
    return LogProbAsk(True, start, top, tuple(ids))


def _routes_from(body: dict[str, Any], limits: ModelLimits, shortest: int) -> int | None:
    """First token whose experts are wanted, None for none."""
    if not _boolean(body.get("return_routed_experts"), "return_routed_experts"):
        return None
    if not limits.routes:
        raise RefusedRequestError(
            "return_routed_experts needs an engine that was started with "
            "--enable-return-routed-experts"
        )
    start = body.get("routed_experts_start_len") or 0
    if type(start) is not int or not 0 <= start <= shortest:
        raise RefusedRequestError(
            f"routed_experts_start_len must be from 0 to {shortest}, the length of the prompt, "
            f"got {start!r}"
        )
    return start


def _check_ask(request: Request, limits: ModelLimits) -> None:
    ask = request.ask
    if ask.start >= len(request.prompt):
        raise RefusedRequestError(
            f"logprob_start_len {ask.start} is not inside the prompt of "
            f"{len(request.prompt)} tokens"
        )
    if ask.token_ids and max(ask.token_ids) >= limits.vocab_size:
        raise RefusedRequestError(
            f"token_ids_logprob must be below {limits.vocab_size} (the vocabulary), got "
            f"{max(ask.token_ids)}"
        )


def _rids(rid: Any, count: int, batched: bool) -> list[str]:
    if rid is None:
        return [uuid4().hex for _ in range(count)]
    if isinstance(rid, str) and rid:
        return [f"{rid}_{i}" for i in range(count)] if batched else [rid]
    if isinstance(rid, list) and all(isinstance(item, str) and item for item in rid):
        if len(rid) != count or len(set(rid)) != count:
            raise RefusedRequestError(f"rid must be {count} different ids, got {rid}")
        return rid
    raise RefusedRequestError(f"rid must be a string or a list of strings, got {rid!r}")


def _seed(seed: int | None, sample: int, new_seed: SeedSource) -> int:
    """The sample's seed. Samples of one prompt (n > 1) get streams of their own."""
    base = new_seed() if seed is None else seed & SEED_MASK
    if sample == 0:
        return base
    return int.from_bytes(hashlib.sha256(f"{base}/{sample}".encode()).digest()[:8], "big")


def _boolean(value: Any, name: str) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RefusedRequestError(f"{name} must be true or false, got {value!r}")
    return value
