import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.refs import Ref, canonical, canonical_json, digest_of, is_finite, restore

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@settings(deadline=None, max_examples=60)
@given(VALUES)
def test_documents_come_back_through_any_json_library(value):
    again = restore(json.loads(canonical_json(value)))
    assert again == value


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.text(), VALUES, min_size=2, max_size=4))
def test_digest_does_not_depend_on_the_order_of_keys(value):
    assert digest_of(dict(reversed(value.items()))) == digest_of(value)


@pytest.mark.parametrize("text", ["f:1.0", "f:nan", "s:", "s:f:1", "f:", "plain"])
def test_text_that_looks_like_a_mark_stays_text(text):
    assert restore(canonical(text)) == text


def test_floats_integers_and_special_values_stay_apart():
    digests = {
        digest_of(v) for v in (1, 1.0, "1.0", "f:1.0", True, None, math.nan, math.inf, "nan")
    }
    assert len(digests) == 9
    assert math.isnan(restore(canonical(math.nan))) and restore(canonical(-math.inf)) == -math.inf
    assert math.copysign(1, restore(canonical(-0.0))) == -1


def test_known_digest():
    # printf '{"a":["f:0.1",1],"b":null}' | sha256sum
    text = '{"a":["f:0.1",1],"b":null}'
    assert canonical_json({"b": None, "a": (0.1, 1)}).decode() == text
    assert digest_of({"b": None, "a": [0.1, 1]}) == (
        "0c51de628c9369e85f4c79da4a70c18742b7e4ec94a23cd60433d3fb18b4b83f"
    )


def test_what_json_cannot_say_is_refused():
    with pytest.raises(TypeError, match="bytes cannot stand"):
        canonical({"a": b"x"})


def test_refs_are_plain():
    ref = Ref("k", "seal", 3, rows=8)
    assert Ref(**json.loads(json.dumps(ref.to_dict()))) == ref
    assert is_finite(0.0) and not any(map(is_finite, (None, math.nan, math.inf)))
