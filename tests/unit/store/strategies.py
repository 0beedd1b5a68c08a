"""Hypothesis strategies: samples with anything in them that a run may produce."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from slime_core.sample import PrefixCacheInfo, Sample, Span, SpecInfo, Status

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
COUNT = st.integers(0, 2**40)
TEXT = st.text(max_size=12) | st.sampled_from(["\x00", "\u2028", "🙂", "$float", "f:1.0", "\ud800"])
FLOAT = st.floats()
FLOAT32 = st.floats(width=32)
ARRAY = arrays.arrays(
    st.sampled_from(["<f4", "<f8", "<i8", "|u1", "|b1", "<U3"]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
LEAF = (
    st.none()
    | st.booleans()
    | st.integers()
    | FLOAT
    | TEXT
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False)
    | ARRAY
    | FLOAT32.map(np.float32)
    | INT64.map(np.int64)
)
KEY = TEXT | st.integers() | st.tuples(st.integers(), TEXT)
VALUE = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEY, inner, max_size=3)
        | st.sets(st.integers() | TEXT, max_size=3)
    ),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, VALUE, max_size=3)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), max_size=3)


def per_token(of: st.SearchStrategy[Any], length: int) -> st.SearchStrategy[Any]:
    return st.none() | st.lists(of, min_size=length, max_size=length)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Any sample whose lengths agree."""
    length = draw(st.integers(0, 4))
    tokens = draw(st.lists(INT32, min_size=length, max_size=length + 3))
    kept = draw(st.lists(INT32, max_size=4))
    cuts = sorted(draw(st.lists(st.integers(0, len(kept)), min_size=length, max_size=length)))
    nucleus = draw(st.booleans())
    spans, start = [], 0
    while start < length:
        size = draw(st.integers(1, length - start))
        spans.append(Span(start, size, draw(TEXT.filter(is_unicode)), draw(st.booleans())))
        start += size
    experts = arrays.arrays(
        np.int32, st.just((max(0, len(tokens) - 1), 2, 2)), elements=st.integers(-1, 70_000)
    )
    sample = Sample(
        group_index=draw(st.none() | INT64),
        index=draw(st.none() | INT64),
        rollout_id=draw(st.none() | INT64),
        attempt=draw(COUNT),
        prompt=draw(TEXT | MESSAGES),
        tokens=tokens,
        multimodal_inputs=draw(st.none() | OBJECT),
        multimodal_train_inputs=draw(st.none() | OBJECT),
        multimodal_train_input_id=draw(st.none() | TEXT),
        apply_chat_template_kwargs=draw(OBJECT),
        response=draw(TEXT),
        response_length=length,
        label=draw(st.none() | TEXT),
        reward=draw(st.none() | FLOAT | st.integers() | st.dictionaries(TEXT, FLOAT, max_size=2)),
        loss_mask=draw(per_token(st.integers(0, 1), length)),
        weight_versions=draw(st.lists(TEXT, max_size=2)),
        spans=draw(st.sampled_from([[], spans])),
        rollout_log_probs=draw(per_token(FLOAT32, length)),
        rollout_top_p_token_ids=kept if nucleus else None,
        rollout_top_p_token_offsets=[0, *cuts] if nucleus else None,
        rollout_routed_experts=draw(st.none() | experts | experts.map(lambda a: a.tolist())),
        remove_sample=draw(st.booleans()),
        teacher_log_probs=draw(per_token(FLOAT32, length)),
        status=draw(st.sampled_from(Status)),
        metadata=draw(OBJECT),
        generate_function_path=draw(st.none() | TEXT),
        custom_rm_path=draw(st.none() | TEXT),
        train_metadata=draw(st.none() | OBJECT),
        session_id=draw(st.none() | TEXT),
        non_generation_time=draw(FLOAT),
        spec_info=SpecInfo(*(draw(COUNT) for _ in range(4))),
        prefix_cache_info=PrefixCacheInfo(draw(COUNT), draw(COUNT)),
    )
    for name, value in draw(st.dictionaries(TEXT.map("x_{}".format), VALUE, max_size=2)).items():
        setattr(sample, name, value)
    return sample


def is_unicode(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


def same(a: Any, b: Any) -> bool:
    """Equality that knows numpy and NaN, and that a float is no integer."""
    if isinstance(a, (np.ndarray, np.generic)):
        if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(k in b and same(v, b[k]) for k, v in a.items())
    return a == b


def same_sample(a: Sample, b: Sample) -> bool:
    """As `same`, over all attributes; an integer reward may come back as an equal float."""
    left, right = a.to_dict(), b.to_dict()
    if isinstance(left["reward"], int) and left["reward"] == right["reward"]:
        right["reward"] = left["reward"]
    return same(left, right)
