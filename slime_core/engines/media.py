"""Media of a sample in the form of SGLang's requests."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from slime_core.errors import DataError

FIELDS = {"images": "image_data", "videos": "video_data", "audios": "audio_data"}
"""Key of multimodal_inputs -> field of a request."""


def media_fields(inputs: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """The fields that carry a sample's media: paths, URLs and data URIs as they are, bytes and
    pictures as data URIs.

    Raises:
        DataError: an item is of another kind.
    """
    found = {}
    for kind, items in (inputs or {}).items():
        name = FIELDS.get(kind)
        if name is not None and items:
            found[name] = [media_text(item, kind) for item in items]
    return found


def media_text(item: Any, kind: str = "images") -> str:
    """One item as text.

    Raises:
        DataError: it is no path, URL, bytes or picture.
    """
    if isinstance(item, str):
        return item
    if isinstance(item, Mapping):  # as datasets keep pictures in parquet files
        item = item.get("bytes") or item.get("path") or item.get("url")
        if isinstance(item, str):
            return item
    if isinstance(item, (bytes, bytearray, memoryview)):
        data = base64.b64encode(bytes(item)).decode("ascii")
        return f"data:{_type_of(bytes(item[:12]), kind)};base64,{data}"
    if hasattr(item, "save") and hasattr(item, "mode"):  # PIL
        buffer = io.BytesIO()
        item.save(buffer, format="PNG")
        return media_text(buffer.getvalue(), kind)
    raise DataError(f"{kind} hold a {type(item).__name__}; a path, URL, bytes or picture is needed")


def _type_of(head: bytes, kind: str) -> str:
    if head.startswith(b"\x89PNG"):
        return "image/png"
    if head.startswith(b"\xff\xd8"):
        return "image/jpeg"
    return {"images": "image/png", "videos": "video/mp4", "audios": "audio/wav"}[kind]
