"""A conversation as tokens: what was sampled and what was put in between, never retokenised."""

from __future__ import annotations

import time
from typing import Any

from slime_core.data.render import encode
from slime_core.engines.media import media_fields
from slime_core.rollout.bridge import bridge, without_sampled_end
from slime_core.rollout.runtime import Runtime
from slime_core.sample import Sample, Status


class Turns:
    """Grows one sample turn by turn.

    Attributes:
        sample: holds tokens, log-probs, spans and mask of everything so far.
        text: what the model said last.
        count: turns so far.
    """

    def __init__(self, runtime: Runtime, sample: Sample) -> None:
        self._runtime = runtime
        self.sample = sample
        self.text = ""
        self.count = 0

    @property
    def over(self) -> bool:
        """Nothing can follow: the length is used up, or the rollout was stopped."""
        return self.sample.status is not Status.COMPLETED or self._room() < 1

    async def answer(self, params: dict[str, Any] | None = None) -> str:
        """The model's next turn; returns its text without end tokens.

        Args:
            params: SGLang's sampling parameters; length and seed are set here.
        """
        sample, runtime = self.sample, self._runtime
        if self._room() < 1:
            sample.status = Status.TRUNCATED
            return ""
        body = {
            "input_ids": sample.tokens,
            "sampling_params": {**(params or {}), **runtime.sampling_params(sample)},
            "return_logprob": True,
            **media_fields(sample.multimodal_inputs),
        }
        if routes := runtime.sampling.routes:
            body |= routes.fields([sample])
        result = await runtime.generate(body, session=sample.session_id or sample.describe())
        meta = result["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        tokens = [int(pair[1]) for pair in pairs]
        if routes:
            meta = routes.told(sample, body, meta)
        log_probs = [float(pair[0]) for pair in pairs]
        sample.append_response_tokens(routes, tokens=tokens, log_probs=log_probs, meta_info=meta)
        self.count += 1
        self.text = runtime.tokenizer.decode(tokens, skip_special_tokens=True)
        return self.text

    def put(self, text: str) -> None:
        """Adds text that no model sampled; it is not trained. Cut to the room that is left."""
        tokens = encode(self._runtime.tokenizer, text)
        room = self._room()
        self.sample.append_response_tokens(tokens=tokens[:room], log_probs=None, trainable=False)
        if len(tokens) >= room:
            self.sample.status = Status.TRUNCATED

    def put_result(self, result: str, role: str = "tool") -> None:
        """Adds the message that answers the model's last turn, and the head of its next one."""
        self.put(self._bridge(result, role))

    def waited(self, since_s: float) -> None:
        """Counts time since a monotonic clock's value as time without generation."""
        self.sample.non_generation_time += time.monotonic() - since_s

    def _bridge(self, result: str, role: str) -> str:
        tokenizer, args = self._runtime.tokenizer, self._runtime.args
        chat = getattr(args, "apply_chat_template", False) or isinstance(self.sample.prompt, list)
        if not chat:
            return f"\n<tool_response>\n{result}\n</tool_response>\n"
        told = [{"role": role, "content": result}]
        text = bridge(tokenizer, told, self.sample.apply_chat_template_kwargs)
        return without_sampled_end(tokenizer, text, self.sample.tokens)

    def _room(self) -> int:
        return self._runtime.sampling.left(self.sample)
