"""A tokenizer of characters, and an engine that says what it is told to."""

import json
from contextlib import asynccontextmanager
from typing import Any

from slime_core.engines.protocol import (
    GenerateRequest,
    GenerateResult,
    Unread,
    generate_body,
    parse_result,
)

EOS = 0


class Characters:
    """A tokenizer of one token a character; 0 is the end token."""

    chat_template = "yes"
    eos_token_id = EOS
    keeps_prefix = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [EOS if c == "~" else ord(c) for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        end = "" if skip_special_tokens else "~"
        return "".join(end if i == EOS else chr(i) for i in ids)

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        parts = [f"[{m['role']}]{m['content']}~\n" for m in messages]
        if not self.keeps_prefix and len(parts) > 2:
            parts[1] = "[assistant](thought)~\n"
        return "".join(parts) + ("[assistant]" if options["add_generation_prompt"] else "")


class Script:
    """Engine and gate in one: each request is answered by the next text, its end token sampled."""

    url = "scripted"

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.bodies: list[dict[str, Any]] = []

    @asynccontextmanager
    async def engine(self, count: int, wait_s: float, **_: Any):
        yield self

    async def generate_raw(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(json.loads(json.dumps(body)))
        text = self.texts.pop(0)
        tokens = [*map(ord, text), EOS][: body["sampling_params"]["max_new_tokens"]]
        finish = "stop" if tokens[-1:] == [EOS] else "length"
        meta = {
            "finish_reason": {"type": finish}, "weight_version": "a-1", "id": "r",
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        }  # fmt: skip
        return {"text": text, "output_ids": tokens, "meta_info": meta}

    async def generate_batch(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        return [parse_result(await self.generate_raw(generate_body(one))) for one in requests]

    async def generate_unread(self, requests: list[GenerateRequest]) -> Unread:
        results = await self.generate_batch(requests)
        return Unread(lambda: results)
