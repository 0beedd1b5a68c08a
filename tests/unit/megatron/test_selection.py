"""Which parameters are trained."""

import pytest

from slime_core.errors import ConfigError
from slime_core.megatron.selection import trained_names

NAMES = [
    "embedding.word_embeddings.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.1.self_attention.linear_qkv.weight",
    "decoder.layers.1.mlp.linear_fc1.weight",
]


@pytest.mark.parametrize(
    ("only", "frozen", "wanted"),
    [
        (None, None, NAMES),
        (["mlp"], None, [NAMES[2], NAMES[4]]),
        ([r"layers\.1\.", "embedding"], None, [NAMES[0], NAMES[3], NAMES[4]]),
        (None, ["embedding"], NAMES[1:]),
        (["layers"], [r"layers\.0\.", "mlp"], [NAMES[3]]),
    ],
)
def test_patterns_choose(only, frozen, wanted):
    assert trained_names(NAMES, only, frozen) == set(wanted)


@pytest.mark.parametrize(
    ("only", "frozen", "sentence"),
    [
        (["experts"], None, "only_train_params_name_list: 'experts' fits no parameter"),
        (None, ["typo"], "freeze_params_name_list: 'typo' fits no parameter"),
        (["("], None, "is no regular expression"),
        (["mlp"], ["decoder"], "leave no parameter to train"),
    ],
)
def test_what_would_choose_nothing_is_refused(only, frozen, sentence):
    with pytest.raises(ConfigError, match=sentence):
        trained_names(NAMES, only, frozen)
