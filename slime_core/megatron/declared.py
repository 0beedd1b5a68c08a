"""The fields of Megatron's configuration classes, read from its source files.

Importing Megatron takes seconds and torch; checking a name before anything starts must not.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal, Optional, Union

from slime_core.errors import ConfigError

PLACES = {
    "TransformerConfig": "transformer/transformer_config.py",
    "ModelParallelConfig": "model_parallel_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
}
TARGETS = ("TransformerConfig", "OptimizerConfig", "DistributedDataParallelConfig")
PLAIN = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "List": list}


class Dtype:
    """Stands for torch.dtype, whose values are given by name."""


@cache
def declared_fields() -> dict[str, dict[str, Any]]:
    """Class name -> field name -> type, of the installed Megatron. Types that only Megatron knows
    are Any.

    Raises:
        ConfigError: Megatron is not installed, or its files are not where they are known to be.
    """
    return {name: _fields(name) for name in TARGETS}


def _fields(name: str) -> dict[str, Any]:
    node = _class(name)
    found: dict[str, Any] = {}
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in PLACES:
            found |= _fields(base.id)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found[item.target.id] = type_of(item.annotation)
    return found


def _class(name: str) -> ast.ClassDef:
    try:
        path = Path(str(distribution("megatron-core").locate_file(f"megatron/core/{PLACES[name]}")))
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (PackageNotFoundError, OSError) as error:
        raise ConfigError(
            f"megatron-core cannot be read ({error}): install slime-flow with its dependencies"
        ) from error
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise ConfigError(f"{path} holds no class {name}: this version of megatron-core is not known")


def type_of(node: ast.expr) -> Any:
    """The type that an annotation means; Any where only Megatron knows it."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return PLAIN.get(node.id, Any)
    if isinstance(node, ast.Attribute):
        return Dtype if node.attr == "dtype" else Any
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return Union[type_of(node.left), type_of(node.right)]  # noqa: UP007
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        return Any
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if node.value.id in ("List", "list"):
        return list
    members = tuple(type_of(item) for item in inner)
    if node.value.id == "Literal":
        return Literal[members]
    if node.value.id == "Optional":
        return Optional[members[0]]  # noqa: UP045
    return Union[members] if node.value.id == "Union" else Any  # noqa: UP007
