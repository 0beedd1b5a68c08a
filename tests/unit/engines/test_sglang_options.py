"""SGLang's options are known without SGLang."""

import pytest

from slime_core.engines.launcher import EMBEDDED_OPTIONS, H200_OPTIONS
from slime_core.engines.sglang_options import needs_sglang, option_list, option_problems


def test_the_options_that_we_use_ourselves_are_in_the_list():
    assert set(EMBEDDED_OPTIONS | set(H200_OPTIONS)) <= set(option_list().kinds)
    assert option_problems(H200_OPTIONS) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mem_fraction_statik": 0.5}, "did you mean --sglang-mem-fraction-static?"),
        ({"zzz": 1}, "--sglang-zzz is no option of SGLang 0.5.17: remove it"),
        ({"context_length": "long"}, "--sglang-context-length must be a whole number, not 'long'"),
        ({"context_length": True}, "--sglang-context-length must be a whole number, not True"),
        ({"mem_fraction_static": "half"}, "must be a number, not 'half'"),
        ({"disable_radix_cache": 3}, "must be true or false, not 3"),
        ({"port": 3}, "--sglang-port is set by the launcher: remove it"),
    ],
)
def test_a_wrong_option_is_one_sentence(options, sentence):
    (problem,) = option_problems(options)
    assert sentence in problem


def test_sizes_may_be_short_where_sglang_itself_reads_them():
    assert option_problems({"context_length": "8k", "max_total_tokens": 9}) == []
    assert option_problems({"context_length": 8192}, embedded=True) == []
    (problem,) = option_problems({"context_length": "8k"}, embedded=True)
    assert problem == "--sglang-context-length must be a whole number, not '8k'"


def test_what_the_embedded_engine_ignores_is_known():
    options = {"random_seed": 1, "attention_backend": "triton", "mem_fraction_static": 0.4}
    assert needs_sglang(options) == ["attention_backend", "mem_fraction_static"]
