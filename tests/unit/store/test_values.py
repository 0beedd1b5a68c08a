import json
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings

from slime_core.errors import DataError
from slime_core.store.values import from_json, to_json
from tests.unit.store.strategies import VALUE, same


@settings(deadline=None)
@given(VALUE)
def test_values_come_back_as_they_were(value):
    text = to_json(value)
    assert same(from_json(text), value)
    assert text.isascii() and "NaN" not in json.dumps(json.loads(text))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, None, "é", 0.5, True]}, '{"a":[1,null,"\\u00e9",0.5,true]}'),
        ({}, "{}"),
        (float("nan"), '{"$float":"nan"}'),
        (b"\x00\xff", '{"$bytes":"AP8="}'),
        ((1, 2), '{"$tuple":[1,2]}'),
        ({1: "a"}, '{"$dict":[[1,"a"]]}'),
        ({"$float": "1"}, '{"$dict":[["$float","1"]]}'),
        (np.float32(1), '{"$scalar":["<f4","AACAPw=="]}'),
        (np.array([[1]], np.uint8), '{"$array":["|u1",[1,1],"AQ=="]}'),
    ],
)
def test_text_of_known_values(value, text):
    assert to_json(value) == text
    assert same(from_json(text), value)


def test_arrays_can_be_written_to_again():
    array = from_json(to_json(np.arange(3)))
    array[0] = 7
    assert array.tolist() == [7, 1, 2]


def test_tensors_of_every_width():
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        torch.arange(4).reshape(2, 2).T,
        torch.tensor(True),
        torch.zeros(0, 3),
    ):
        again = from_json(to_json({"x": tensor}))["x"]
        assert again.dtype == tensor.dtype and torch.equal(again, tensor)


def test_subclasses_become_plain():
    assert from_json(to_json(OrderedDict(a=np.str_("x")))) == {"a": "x"}


class Custom:
    pass


@pytest.mark.parametrize("value", [Custom(), np.array([Custom()]), np.zeros(1, [("a", "<i4")])])
def test_what_cannot_be_kept_is_named_with_its_place(value):
    with pytest.raises(DataError, match=r"metadata of sample 3\['a'\]\[1\] is a .*cannot keep"):
        to_json({"a": [0, value]}, "metadata of sample 3")


def test_marks_of_a_later_version_are_refused():
    with pytest.raises(DataError, match=r"\$later"):
        from_json('{"$later": 1}')


def test_only_torch_types_are_looked_up():
    with pytest.raises(DataError, match="is not a torch dtype"):
        from_json('{"$tensor": ["load", [1], "AA=="]}')
