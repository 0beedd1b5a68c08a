"""Media of any kind as text in a request."""

import base64
import io

import pytest

from slime_core.engines.media import media_fields
from slime_core.engines.protocol import GenerateRequest, batch_body, generate_body
from slime_core.errors import DataError

PNG = b"\x89PNG\r\n\x1a\n"


def test_paths_urls_and_bytes_become_text():
    given = {"images": ["a.png", PNG, {"bytes": PNG, "path": "x"}, {"path": "b.png"}],
             "videos": [], "audios": [b"RIFF"]}  # fmt: skip
    data = "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert media_fields(given) == {
        "image_data": ["a.png", data, data, "b.png"],
        "audio_data": ["data:audio/wav;base64," + base64.b64encode(b"RIFF").decode()],
    }
    assert media_fields(None) == {} and media_fields({"other": [1]}) == {}


def test_a_picture_in_memory_is_sent_as_png():
    image = pytest.importorskip("PIL.Image")
    (text,) = media_fields({"images": [image.new("RGB", (2, 1), (1, 2, 3))]})["image_data"]
    again = image.open(io.BytesIO(base64.b64decode(text.partition(",")[2])))
    assert again.size == (2, 1) and again.getpixel((1, 0)) == (1, 2, 3)


def test_anything_else_is_refused():
    with pytest.raises(DataError, match="images hold a int; a path, URL, bytes or picture"):
        media_fields({"images": [3]})


def test_each_sample_of_a_batch_has_its_own():
    requests = [GenerateRequest([1], media={"image_data": ["a"]}), GenerateRequest([2])]
    assert batch_body(requests)["image_data"] == [["a"], []]
    assert generate_body(requests[0])["image_data"] == ["a"]
    assert "image_data" not in batch_body(requests[1:])
