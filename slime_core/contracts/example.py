"""Realistic data for a trial: samples, a tokenizer of characters, an engine with canned answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from slime_core.agents.gateway import Gateway
from slime_core.config.loading import load_config
from slime_core.engines.protocol import GenerateRequest, GenerateResult, Unread, parse_result
from slime_core.plugins.args_view import ArgsView
from slime_core.rewards.hub import RewardHub, RewardSettings
from slime_core.rollout.generate import Sampling
from slime_core.rollout.runtime import Runtime
from slime_core.sample import Sample, Status
from slime_core.store.draws import Draw

GROUP = 4
ANSWERS = (
    "Let me add them: 17 + 25 = 42. The answer is \\boxed{42}.<|im_end|>",
    "17 + 25 is 43, so \\boxed{43}<|im_end|>",
    "",
    "I think about it step by step. " * 480 + "\\boxed{42}",
)
REWARDS = (1.0, 0.0, 0.0, 1.0)
QUESTION = "What is 17 + 25? Put the answer into \\boxed{}."
SETTINGS: dict[str, Any] = {
    "run": {"num_rollout": 2},
    "data": {"prompt_data": "example.jsonl", "label_key": "label"},
    "rollout": {
        "hf_checkpoint": "example", "rollout_batch_size": 3, "n_samples_per_prompt": GROUP,
        "rollout_max_response_len": 64,
    },
    "rewards": {"rm_type": "math"},
}  # fmt: skip


def example_args(config: str | None) -> ArgsView:
    """The settings of a configuration, or of an example."""
    return ArgsView(load_config(config or SETTINGS, {}))


class CharTokenizer:
    """One token a character; an end token of its own."""

    eos_token, eos_token_id = "<|im_end|>", 1
    pad_token, pad_token_id = "<|pad|>", 0
    bos_token, bos_token_id = None, None
    chat_template = "example"
    name_or_path = "example"

    def encode(self, text: str, add_special_tokens: bool = True, **_: Any) -> list[int]:
        parts = text.split(self.eos_token)
        found: list[int] = []
        for place, part in enumerate(parts):
            found += [1] if place else []
            found += [2 + ord(letter) for letter in part]
        return found

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        end = "" if skip_special_tokens else self.eos_token
        return "".join(end if i == 1 else "" if i == 0 else chr(int(i) - 2) for i in ids)

    def batch_decode(self, rows: Any, **options: Any) -> list[str]:
        return [self.decode(row, **options) for row in rows]

    def __call__(self, text: Any, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [self.encode(one) for one in text]}
        ids = self.encode(text)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def apply_chat_template(
        self, conversation: Any, tokenize: bool = True, add_generation_prompt: bool = False,
        **_: Any,
    ) -> Any:  # fmt: skip
        text = "".join(
            f"<|im_start|>{m['role']}\n{m.get('content') or ''}{self.eos_token}\n"
            for m in conversation
        )
        text += "<|im_start|>assistant\n" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text

    def __len__(self) -> int:
        return 0x110002


class ExampleEngine:
    """Answers in turn what ANSWERS holds; stands for gate and client at once."""

    url = "http://example"

    def __init__(self, tokenizer: CharTokenizer) -> None:
        self._tokenizer = tokenizer
        self.requests = 0

    @asynccontextmanager
    async def engine(
        self, samples: int, wait_s: float, *, continues: bool = False, prefer: str | None = None
    ) -> AsyncIterator[ExampleEngine]:
        yield self

    async def generate_raw(self, body: dict[str, Any]) -> dict[str, Any]:
        """SGLang's JSON answer to one prompt."""
        ids = body.get("input_ids")
        prompt = ids if isinstance(ids, list) else self._tokenizer.encode(str(body.get("text", "")))
        params = body.get("sampling_params") or {}
        most = params.get("max_new_tokens")
        answer = self._tokenizer.encode(ANSWERS[self.requests % 2])
        self.requests += 1
        whole = most is None or len(answer) <= most
        answer = answer if whole else answer[:most]
        reason = {"type": "stop", "matched": 1} if whole else {"type": "length", "length": most}
        return {
            "text": self._tokenizer.decode(answer, skip_special_tokens=True),
            "output_ids": answer,
            "meta_info": {
                "id": f"r{self.requests}", "finish_reason": reason, "weight_version": "l0-0",
                "prompt_tokens": len(prompt), "completion_tokens": len(answer),
                "cached_tokens": 0, "e2e_latency": 0.01,
                "output_token_logprobs": [[-0.25, token, None] for token in answer],
            },
        }  # fmt: skip

    async def generate_batch(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        bodies = [{"input_ids": list(r.tokens), "sampling_params": r.sampling} for r in requests]
        return [parse_result(await self.generate_raw(body)) for body in bodies]

    async def generate_unread(self, requests: Sequence[GenerateRequest]) -> Unread:
        results = await self.generate_batch(requests)
        return Unread(lambda: results)

    async def abort_all(self) -> None:
        """Nothing is in flight."""

    async def mark_down(self, client: Any, why: str) -> None:
        """It never fails."""


def example_runtime(args: ArgsView) -> Runtime:
    """A rollout with the example's engine."""
    tokenizer = CharTokenizer()
    engine: Any = ExampleEngine(tokenizer)
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "no_stop_trim": True}
    return Runtime(
        args=args,
        tokenizer=tokenizer,
        gate=engine,
        hub=RewardHub(RewardSettings(rm_type="exact_match")),
        sampling=Sampling(getattr(args, "rollout_max_response_len", 64), params, 20.0),
        seed_of=lambda sample: sample.index or 0,
        gateway=Gateway("example", GROUP),
    )


def pending(group: int = 0, count: int = GROUP) -> list[Sample]:
    """A group as it is drawn, with its prompt's tokens."""
    tokenizer = CharTokenizer()
    return [
        Sample(
            group_index=group, index=group * count + i, prompt=QUESTION, label="42",
            tokens=tokenizer.encode(QUESTION), metadata={"answer": "42", "source": "example"},
        )
        for i in range(count)
    ]  # fmt: skip


def respond(sample: Sample, text: str, tokenizer: CharTokenizer) -> None:
    """Appends a response of the model."""
    tokens = tokenizer.encode(text) or [1]
    sample.append_response_tokens(
        tokens=tokens, log_probs=[-0.25] * len(tokens), text=text, weight_version="l0-0"
    )


def answered(group: int = 0, rewards: Sequence[float | None] = REWARDS) -> list[Sample]:
    """A finished group: a right answer, a wrong one, an empty one and a very long one."""
    tokenizer = CharTokenizer()
    samples = pending(group)
    for sample, text, reward in zip(samples, ANSWERS, rewards, strict=True):
        respond(sample, text, tokenizer)
        sample.status = Status.COMPLETED if text.endswith("<|im_end|>") else Status.TRUNCATED
        sample.weight_versions, sample.reward = ["l0-0"], reward
    return samples


def draws(first: int, count: int) -> list[Draw]:
    """Logged draws with numbers of their own."""
    return [Draw(i, 0, i, 0, pending(i), None) for i in range(first, first + count)]
