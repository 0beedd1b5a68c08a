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


EXPERTS = [
    f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"
    for layer in (0, 1)
    for expert in (0, 1, 10)
]


def test_the_experts_of_a_layer_are_chosen_together():
    names = [*NAMES, *EXPERTS]
    assert trained_names(names, ["experts"], [r"layers\.1\."]) == set(EXPERTS[:3])
    assert trained_names(names, None, ["experts"]) == set(NAMES)
    for only, frozen in (([r"local_experts\.1\."], None), (None, [r"1\.mlp.*experts\.10\."])):
        with pytest.raises(ConfigError, match="choose among the experts of a layer, such as"):
            trained_names(names, only, frozen)
