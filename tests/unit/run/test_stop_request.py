"""The wish to stop names the owner that is meant."""

import pytest

from slime_core.run.stop_request import FILE, ask, asked


def test_only_the_owner_that_is_meant_stops(tmp_path):
    assert not asked(tmp_path, 3)
    ask(tmp_path, 3)
    assert asked(tmp_path, 3)
    assert not asked(tmp_path, 4), "the one that resumed would stop at once"
    ask(tmp_path, 4)
    assert asked(tmp_path, 4) and not asked(tmp_path, 3)


@pytest.mark.parametrize("text", ["", "[3]", '{"epoch": "3"}', '{"epoch"'])
def test_a_damaged_wish_stops_nobody(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert not asked(tmp_path, 3)
