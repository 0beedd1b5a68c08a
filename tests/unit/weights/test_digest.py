"""What a digest over named tensors sees."""

from __future__ import annotations

import torch

from slime_core.weights.digest import tensor_bytes, tensors_digest


def test_order_does_not_matter_but_names_shapes_dtypes_and_bits_do() -> None:
    a, b = torch.arange(6.0), torch.ones(2)
    base = tensors_digest([("a", a), ("b", b)])
    assert base == tensors_digest([("b", b), ("a", a)])
    changed = a.clone()
    changed[3] = torch.nextafter(changed[3], torch.tensor(99.0))
    others = [
        [("a", b), ("b", a)],
        [("a", a.reshape(2, 3)), ("b", b)],
        [("a", a.view(torch.int32)), ("b", b)],
        [("a", changed), ("b", b)],
        [("a", a)],
    ]
    digests = {tensors_digest(named) for named in others}
    assert len(digests) == len(others)
    assert base not in digests


def test_bytes_are_row_major_whatever_the_strides() -> None:
    x = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    assert bytes(tensor_bytes(x.T)) == x.T.contiguous().numpy().tobytes()
    assert bytes(tensor_bytes(torch.ones(2, dtype=torch.bfloat16))) == b"\x80\x3f\x80\x3f"
