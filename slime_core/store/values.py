"""Plain values as JSON text and back, without loss and without pickle.

JSON's own types stand for themselves, so that a query engine can read them. Whatever JSON lacks is
an object with one key that begins with `$`: `$float` (NaN, infinities), `$bytes`, `$tuple`, `$set`,
`$frozenset`, `$complex`, `$scalar` and `$array` (numpy: dtype, shape, base64), `$tensor` (torch, on
the CPU), and `$dict` (pairs) for dictionaries with keys that are not text or that would look like
one of these.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from slime_core.errors import DataError

_KINDS_OF_ARRAY = "biufcSUmM"
_PLAIN: tuple[Any, ...] = (str, int, float, bytes, dict, list, tuple)


def to_json(value: Any, name: str = "value") -> str:
    """JSON text of a value (ASCII; unpaired surrogates survive as escapes).

    Args:
        value: None, bool, int, float, complex, str, bytes, list, tuple, set, dict, numpy scalar or
            array, torch tensor, and any nesting of them.
            Subclasses of these come back as the plain type.
        name: what an error calls the value, such as `metadata of sample 7`.

    Raises:
        DataError: something of another type, named with its place.
    """
    if value is None:
        return "null"
    if type(value) is dict and not value:
        return "{}"
    return json.dumps(_mark(value, name), allow_nan=False, separators=(",", ":"))


def from_json(text: str) -> Any:
    """The inverse of `to_json`."""
    if text == "{}":
        return {}
    return _unmark(json.loads(text))


def _mark(value: Any, name: str) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if kind is list:
        return [_mark(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _mark(item, f"{name}[{key!r}]") for key, item in value.items()}
        pairs = value.items()
        return {"$dict": [[_mark(key, name), _mark(item, name)] for key, item in pairs]}
    if kind is tuple:
        return {"$tuple": [_mark(item, f"{name}[{i}]") for i, item in enumerate(value)]}
    if kind in (set, frozenset):
        return {f"${kind.__name__}": [_mark(item, name) for item in sorted(value, key=repr)]}
    if kind is bytes:
        return {"$bytes": _text(value)}
    if kind is complex:
        return {"$complex": [_mark(value.real, name), _mark(value.imag, name)]}
    if isinstance(value, (np.ndarray, np.generic)):
        return _mark_array(value, name)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous()
        data = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        dtype = str(flat.dtype).removeprefix("torch.")
        return {"$tensor": [dtype, list(flat.shape), _text(data)]}
    for base in _PLAIN:
        if isinstance(value, base):
            return _mark(base(value), name)
    raise DataError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which the store cannot keep; use "
        "numbers, text, bytes, lists, dictionaries, numpy arrays or torch tensors"
    )


def _mark_array(value: np.ndarray | np.generic, name: str) -> dict[str, Any]:
    dtype = value.dtype
    if dtype.kind not in _KINDS_OF_ARRAY or dtype.fields is not None:
        raise DataError(f"{name} is a numpy array of {dtype}, which the store cannot keep")
    if isinstance(value, np.generic):
        return {"$scalar": [dtype.str, _text(value.tobytes())]}
    return {"$array": [dtype.str, list(value.shape), _text(np.ascontiguousarray(value).tobytes())]}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _array(dtype: str, shape: list[int], text: str) -> np.ndarray:
    data = bytearray(base64.b64decode(text))
    if not data:
        return np.zeros(shape, dtype=np.dtype(dtype))
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)


def _tensor(dtype: str, shape: list[int], text: str) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise DataError(f"{dtype} is not a torch dtype")
    data = bytearray(base64.b64decode(text))
    if not data:
        return torch.zeros(shape, dtype=kind)
    return torch.frombuffer(data, dtype=torch.uint8).view(kind).reshape(shape)


_READERS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": base64.b64decode,
    "$tuple": lambda items: tuple(map(_unmark, items)),
    "$set": lambda items: set(map(_unmark, items)),
    "$frozenset": lambda items: frozenset(map(_unmark, items)),
    "$complex": lambda parts: complex(_unmark(parts[0]), _unmark(parts[1])),
    "$scalar": lambda parts: _array(parts[0], [1], parts[1])[0],
    "$array": lambda parts: _array(*parts),
    "$tensor": lambda parts: _tensor(*parts),
    "$dict": lambda pairs: {_unmark(key): _unmark(item) for key, item in pairs},
}


def _unmark(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmark(item) for item in value]
    if isinstance(value, dict):
        if len(value) == 1:
            key, item = next(iter(value.items()))
            if key in _READERS:
                return _READERS[key](item)
            if key.startswith("$"):
                raise DataError(f"{key} is not a kind of value this version knows")
        return {key: _unmark(item) for key, item in value.items()}
    return value
