"""Requests of generate functions that an engine cut off, continued from their tokens. Pure."""

from __future__ import annotations

import base64
from typing import Any

PER_TOKEN = ("output_token_logprobs", "output_top_logprobs")
ROUTES = "routed_experts"


def was_aborted(answer: dict[str, Any]) -> bool:
    """Whether the engine cut the answer off (a weight update, or the end of the rollout)."""
    reason = answer.get("meta_info", {}).get("finish_reason")
    return (reason.get("type") if isinstance(reason, dict) else reason) == "abort"


def can_continue(body: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Whether a request can go on: it has token ids, and the answer says which came."""
    return isinstance(body.get("input_ids"), list) and isinstance(answer.get("output_ids"), list)


def continued(body: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The request for the rest of an answer."""
    so_far = before["output_ids"]
    params = dict(body.get("sampling_params") or {})
    if params.get("max_new_tokens") is not None:
        params["max_new_tokens"] = max(0, params["max_new_tokens"] - len(so_far))
    if params.get("sampling_seed") is not None:
        params["sampling_seed"] = (int(params["sampling_seed"]) + len(so_far)) % 2**31
    rest = {**body, "input_ids": [*body["input_ids"], *so_far], "sampling_params": params}
    if before.get("meta_info", {}).get(ROUTES):  # of all tokens but the last
        rest[f"{ROUTES}_start_len"] = len(rest["input_ids"]) - 1
    return rest


def joined(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Both parts as one answer; what is counted is of the second."""
    meta = dict(after.get("meta_info", {}))
    for name in PER_TOKEN:
        first, second = before.get("meta_info", {}).get(name), meta.get(name)
        if first is not None or second is not None:
            meta[name] = [*(first or []), *(second or [])]
    first, second = before.get("meta_info", {}).get(ROUTES), meta.get(ROUTES)
    if first and second:
        meta[ROUTES] = base64.b64encode(base64.b64decode(first) + base64.b64decode(second)).decode()
    if "prompt_tokens" in before.get("meta_info", {}):
        meta["prompt_tokens"] = before["meta_info"]["prompt_tokens"]
    if meta.get("completion_tokens") is not None:
        meta["completion_tokens"] += len(before["output_ids"])
    return {
        **after,
        "text": before.get("text", "") + after.get("text", ""),
        "output_ids": [*before["output_ids"], *after.get("output_ids", [])],
        "meta_info": meta,
    }
