"""Masks of conversations: what an assistant said, by its place in one rendering."""

from pathlib import Path
from typing import Any

import pytest

from slime_core.data.loss_masks import MultiTurnLossMaskGenerator
from slime_core.errors import DataError

MODEL = Path(__file__).parents[3] / "configs/quickstart/model"
KEEPS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRIPS = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{{ m['content'] if loop.last else m['content'][1:] }}\n{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "12"},
    {"role": "assistant", "content": "21"},
    {"role": "tool", "content": "ok"},
    {"role": "assistant", "content": "3"},
]


@pytest.fixture
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(MODEL, local_files_only=True)
    found.chat_template = KEEPS
    return found


def test_every_assistant_turn_is_trained_and_nothing_else(tokenizer):
    made = MultiTurnLossMaskGenerator(tokenizer, "qwen3")
    ids, mask = made.get_loss_mask(CHAT)
    assert tokenizer.decode(ids) == "<user>12\n<assistant>21\n<tool>ok\n<assistant>3\n"
    assert made.get_text_from_loss_mask(ids, mask) == ["21\n", "3\n"]
    assert made.get_response_lengths([mask, [0, 0]]) == [len(mask) - mask.index(1), 0]


def test_a_turn_can_be_left_out(tokenizer):
    made = MultiTurnLossMaskGenerator(tokenizer)
    chat = [CHAT[0], CHAT[1] | {"step_loss_mask": 0}, *CHAT[2:]]
    assert made.get_text_from_loss_mask(*made.get_loss_mask(chat)) == ["3\n"]


def test_a_template_that_changes_earlier_turns_is_refused(tokenizer):
    tokenizer.chat_template = STRIPS
    with pytest.raises(DataError, match="message 2: the chat template renders it otherwise"):
        MultiTurnLossMaskGenerator(tokenizer).get_loss_mask(CHAT)
