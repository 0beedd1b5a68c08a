"""Fields read from Megatron's source files are those of its classes."""

import ast
from typing import Any, Literal, Optional, Union

import pytest

from slime_core.megatron.arguments import _megatron_fields
from slime_core.megatron.declared import Dtype, declared_fields, type_of


def test_the_declared_names_are_those_of_the_classes():
    real, declared = _megatron_fields(), declared_fields()
    assert {name: set(fields) for name, fields in declared.items()} == {
        name: set(fields) for name, fields in real.items()
    }


def test_plain_types_are_those_of_the_classes():
    real, declared = _megatron_fields(), declared_fields()
    plain = (int, float, bool, str, Optional[int], Optional[float], Optional[str])  # noqa: UP045
    wrong = [
        (name, field)
        for name, fields in real.items()
        for field, kind in fields.items()
        if kind in plain and declared[name][field] != kind
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        ("int", int),
        ("Optional[int]", Optional[int]),  # noqa: UP045
        ("int | None", Union[int, None]),  # noqa: UP007
        ("Optional[Literal['full', 'selective']]", Optional[Literal["full", "selective"]]),  # noqa: UP045
        ("Union[int, List[int]]", Union[int, list]),  # noqa: UP007
        ("torch.dtype", Dtype),
        ("Callable", Any),
        ("AttnBackend", Any),
        ("Optional[Tuple[int, int]]", Optional[Any]),  # noqa: UP045
    ],
)
def test_an_annotation_becomes_a_type(annotation, kind):
    assert type_of(ast.parse(annotation, mode="eval").body) == kind
