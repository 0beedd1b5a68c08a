"""Which tokens of a conversation an assistant said: masks for supervised and rebuilt samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_core.batching.masks import response_length
from slime_core.data.render import Message, render_chat
from slime_core.errors import DataError


class MultiTurnLossMaskGenerator:
    """Masks from one full rendering, by the places of the assistant's text in it.

    Args:
        tokenizer: a fast one, with a chat template.
        tokenizer_type: slime's mask type; every type is made the same way here.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type

    def get_loss_mask(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Token ids [n] of the conversation and their mask [n]: 1 for what an assistant said, its
        end token included, unless the message has `step_loss_mask` 0.

        Raises:
            DataError: the template changes earlier messages when later ones follow.
        """
        full = self._render(messages, tools, False)
        spans = []
        for place, message in enumerate(messages):
            if message.get("role") == "assistant" and message.get("step_loss_mask", 1):
                start = self._render(messages[:place], tools, True)
                end = self._render(messages[: place + 1], tools, False)
                if not full.startswith(start) or not full.startswith(end):
                    raise DataError(
                        f"message {place + 1}: the chat template renders it otherwise when others "
                        "follow, so its place among the tokens is not known"
                    )
                spans.append((len(start), len(end)))
        found = self.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
        offsets = found["offset_mapping"]
        mask = [int(any(a <= begin < b for a, b in spans)) for begin, _ in offsets]
        return list(found["input_ids"]), mask

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Tokens from the first trained one to the end, for each mask."""
        return [response_length(mask) for mask in loss_masks]

    def get_text_from_loss_mask(
        self, token_ids: Sequence[int], loss_masks: Sequence[int]
    ) -> list[str]:
        """The text of each trained stretch."""
        stretches: list[list[int]] = []
        for place, (token, trained) in enumerate(zip(token_ids, loss_masks, strict=True)):
            if trained and (not place or not loss_masks[place - 1]):
                stretches.append([])
            if trained:
                stretches[-1].append(token)
        return [self.tokenizer.decode(tokens) for tokens in stretches]

    def _render(self, messages: Sequence[Message], tools: Any, generate: bool) -> str:
        if not messages:
            return ""
        return render_chat(self.tokenizer, messages, tools=tools, add_generation_prompt=generate)
