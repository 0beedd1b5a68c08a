"""metrics.jsonl after kills, doubles and full disks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import FullError, StoreError
from slime_core.tracking.jsonl import MetricsFile
from slime_core.tracking.projection import Record


def record(k: int) -> Record:
    return Record(f"iterations/{k:06d}", k, float(k), {"train/loss": k / 2})


def test_a_key_is_written_once(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert [file.append(record(k)) for k in (0, 1, 1, 0)] == [True, True, False, False]
    assert [found.step for found in file.read()] == [0, 1]


def test_a_reopened_file_knows_its_keys(tmp_path):
    MetricsFile(tmp_path / "metrics.jsonl").append(record(0))
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert not file.append(record(0))
    assert file.append(record(1))


@given(lines=st.integers(0, 5), cut=st.integers(1, 200))
def test_a_kill_at_any_byte_costs_at_most_the_torn_lines(tmp_path_factory, lines, cut):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    file = MetricsFile(path)
    for k in range(lines):
        file.append(record(k))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut] if cut < len(whole) else b"")
    kept = path.read_bytes().count(b"\n")

    file = MetricsFile(path)
    assert [found.step for found in file.read()] == list(range(kept))
    for k in range(lines):
        file.append(record(k))
    assert path.read_bytes() == whole


def test_reading_goes_on_where_it_stopped(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(record(0))
    [(_, offset)] = file.read_with_offsets()
    file.append(record(1))
    assert [found.step for found, _ in file.read_with_offsets(offset)] == [1]


def test_damage_in_the_middle_names_the_file_and_the_cure(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"key": 1\n')
    with pytest.raises(StoreError, match=r"metrics.jsonl: .*damaged.*delete the file"):
        MetricsFile(tmp_path / "metrics.jsonl")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"metrics.jsonl cannot be written"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl")


def test_a_full_disk_leaves_whole_lines_and_the_record_can_be_written_later(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(record(0))
    whole = file._file

    class Short:
        """Takes ten bytes, as a disk does that becomes full."""

        def write(self, data: bytes) -> int:
            return whole.write(data[:10])

        def __getattr__(self, name: str):
            return getattr(whole, name)

    file._file = Short()
    with pytest.raises(FullError, match=r"no space left to write .*metrics\.jsonl"):
        file.append(record(1))
    file._file = whole
    assert file.append(record(1)) and not file.append(record(1))
    assert [found.step for found in file.read()] == [0, 1]
