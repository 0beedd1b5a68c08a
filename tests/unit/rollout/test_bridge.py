"""Joining turns under chat templates that keep, shorten or rewrite what was said."""

import pytest

from slime_core.errors import PluginError
from slime_core.rollout.bridge import bridge, is_end, what_changes, without_sampled_end
from tests.unit.rollout.scripted import EOS, Characters

TOOL = [{"role": "tool", "content": "42"}]
USER = [{"role": "user", "content": "sure?"}]


class Thinking(Characters):
    """As templates of reasoning models do: an answer that stands last shows that it did not think,
    and thoughts before the last question of the user are left out."""

    all_special_ids = (EOS,)

    def apply_chat_template(self, messages, **options):
        asked = max(i for i, m in enumerate(messages) if m["role"] == "user")
        shown = ""
        for i, message in enumerate(messages):
            text = message["content"]
            if message["role"] == "assistant":
                _, mark, said = text.rpartition("</think>")
                if i < asked:
                    text = said.lstrip() if mark else text
                elif not mark and i == len(messages) - 1:
                    text = f"<think>\n\n</think>\n\n{text}"
            shown += f"[{message['role']}]{text}~\n"
        return shown + ("[assistant]" if options["add_generation_prompt"] else "")


class Rewriting(Characters):
    keeps_prefix = False


def test_what_stands_between_two_answers_is_the_templates_own():
    assert bridge(Characters(), TOOL, {}) == "~\n[tool]42~\n[assistant]"
    assert bridge(Characters(), TOOL + USER, {}) == "~\n[tool]42~\n[user]sure?~\n[assistant]"
    assert bridge(Thinking(), TOOL, {}) == "~\n[tool]42~\n[assistant]", "no empty thought"


def test_an_end_token_that_was_sampled_is_not_put_again():
    text, tokenizer = "~\n[user]", Characters()
    assert without_sampled_end(tokenizer, text, [65, EOS]) == "\n[user]"
    assert without_sampled_end(tokenizer, text, [65, 66]) == text
    assert without_sampled_end(tokenizer, text, []) == text
    begins_alike = "A letter, and no end token"
    assert without_sampled_end(tokenizer, begins_alike, [ord("A")]) == begins_alike
    assert is_end(tokenizer, EOS) and not is_end(tokenizer, ord("~"))


def test_the_check_tells_a_template_that_keeps_from_one_that_shortens():
    assert what_changes(Characters(), "tool", {}) is None
    assert what_changes(Thinking(), "tool", {}) is None, "thoughts stay while tools answer"
    assert "leaves out earlier reasoning once a user message" in (
        what_changes(Thinking(), "user", {}) or "")  # fmt: skip


def test_a_template_that_rewrites_answers_is_refused():
    for role in ("tool", "user"):
        with pytest.raises(PluginError, match="take a template that keeps its prefix"):
            what_changes(Rewriting(), role, {})


class Gathering(Characters):
    """Puts what the system says to the front, wherever it was said."""

    def apply_chat_template(self, messages, **options):
        first = sorted(messages, key=lambda message: message["role"] != "system")
        return super().apply_chat_template(first, **options)


def test_a_message_that_a_template_moves_to_the_front_is_not_lost_silently():
    assert bridge(Gathering(), USER, {}) == "~\n[user]sure?~\n[assistant]"
    with pytest.raises(PluginError, match="changes earlier messages when a system message"):
        bridge(Gathering(), [{"role": "system", "content": "be brief"}], {})
