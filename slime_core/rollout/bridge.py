"""What a chat template puts between an answer and the next one, so that turns are joined token by
token, and whether the template itself would have kept what was said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.data.render import render_chat
from slime_core.errors import PluginError

PROBE_USER, PROBE_ANSWER = "What is it?", "An answer to begin with."
THOUGHT, MORE = "Let me see.", "Go on."


def bridge(tokenizer: Any, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> str:
    """Everything between the last word of an answer and the first of the next one, where these
    messages stand between them: the answer's end, the messages, the head of the next answer.

    Raises:
        PluginError: the template changes earlier messages, so turns cannot be joined.
    """
    asked = [
        {"role": "user", "content": PROBE_USER},
        {"role": "assistant", "content": PROBE_ANSWER},
    ]
    told = [dict(message) for message in messages]
    text = render_chat(tokenizer, [*asked, *told], template_kwargs=kwargs)
    before, found, behind = text.partition(PROBE_ANSWER)
    head = before.partition(PROBE_USER)[0]
    alone = render_chat(tokenizer, asked, template_kwargs=kwargs).partition(PROBE_USER)[0]
    if not found or PROBE_USER not in before or head != alone:
        raise PluginError(
            f"the chat template changes earlier messages when a {told[-1]['role']} message "
            "follows, so turns cannot be joined: take a template that keeps its prefix"
        )
    return behind


def without_sampled_end(tokenizer: Any, text: str, tokens: Sequence[int]) -> str:
    """A bridge less the end token, if the model sampled it as the last of `tokens`."""
    if not tokens or not is_end(tokenizer, tokens[-1]):
        return text
    return text.removeprefix(tokenizer.decode([tokens[-1]], skip_special_tokens=False))


def is_end(tokenizer: Any, token: int) -> bool:
    """Whether a token ends answers and is no text."""
    special = getattr(tokenizer, "all_special_ids", ())
    return token == getattr(tokenizer, "eos_token_id", None) or token in special


def what_changes(tokenizer: Any, role: str, kwargs: Mapping[str, Any]) -> str | None:
    """How a template changes what was said once a message of this role follows; None where it
    keeps its prefix.

    Raises:
        PluginError: turns cannot be joined at all.
    """
    follows = {"role": role, "content": MORE}
    bridge(tokenizer, [follows], kwargs)
    said = f"<think>\n{THOUGHT}\n</think>\n\n{PROBE_ANSWER}"
    begun = [{"role": "user", "content": PROBE_USER}, {"role": "assistant", "content": said},
             follows]  # fmt: skip
    longer = [*begun, {"role": "assistant", "content": said}, follows]
    first, second = (
        render_chat(tokenizer, some, template_kwargs=kwargs, add_generation_prompt=False)
        for some in (begun, longer)
    )
    if said not in first:
        return f"the chat template leaves out earlier reasoning once a {role} message follows"
    if not second.startswith(first):
        return f"the chat template changes earlier messages once further {role} messages follow"
    return None
