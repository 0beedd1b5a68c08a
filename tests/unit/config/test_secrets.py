"""What others see of a configuration."""

import pytest

from slime_core.config.secrets import HIDDEN, hidden, is_secret
from tests.unit.config.trees import small


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        ("api_key", True),
        ("admin-api-key", True),
        ("hf_token", True),
        ("Password", True),
        ("tokenizer_path", False),
        ("max_total_tokens", False),
        ("grader_secrets", False),
    ],
)
def test_a_secret_is_known_by_its_key(key, secret):
    assert is_secret(key) is secret


def test_keys_among_the_engines_options_are_hidden_and_nothing_else():
    given = {"api_key": "s3cret", "mem_fraction_static": 0.8, "nested": {"hf_token": "s3cret"}}
    config = small(sglang=given)
    shown = hidden(config)
    assert shown.sglang == {
        "api_key": HIDDEN,
        "mem_fraction_static": 0.8,
        "nested": {"hf_token": HIDDEN},
    }
    assert "s3cret" not in shown.model_dump_json()
    assert config.sglang == given and shown.model_copy(update={"sglang": given}) == config
