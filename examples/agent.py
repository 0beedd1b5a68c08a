"""An agent that knows nothing of training: it talks to the model with OpenAI's client.

    pip install 'slime-flow[agents]'
    slime train examples/agent.yaml

It asks for a sorted number, looks at the answer, and asks again, up to three times. What the model
said is trained, whatever the agent does in between.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from openai import AsyncOpenAI

TRIES, ANSWER_TOKENS = 3, 6


@lru_cache(maxsize=1)
def client_of(base_url: str) -> AsyncOpenAI:
    """One client with its connections for all sessions; each brings its own key."""
    return AsyncOpenAI(base_url=base_url, api_key="-")


async def agent(base_url: str, api_key: str, sample: Any) -> float:
    """1.0 for a right answer at once, half of it at the second try, and so on."""
    client = client_of(base_url).with_options(api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": sample.prompt}]
    for number in range(TRIES):
        answer = await client.chat.completions.create(
            model="model", messages=messages, max_tokens=ANSWER_TOKENS
        )
        said = answer.choices[0].message.content or ""
        if said.strip() == sample.label:
            return 0.5**number
        messages += [{"role": "assistant", "content": said},
                     {"role": "user", "content": sample.prompt}]  # fmt: skip
    return 0.0
