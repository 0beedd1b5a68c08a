import pyarrow as pa
import pytest

from slime_core.errors import DataError, DigestError, MissingError
from slime_core.store import layout
from slime_core.store.backend import MemoryBackend, open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.digest import checksum, rows_digest
from slime_core.store.parts import list_parts, open_part, write_part
from tests.unit.store.builders import SAMPLES, finished_sample, group_rows, write_groups


@pytest.fixture
def backend(tmp_path):
    return open_backend(str(tmp_path))


def replace(backend, key: str, data: bytes) -> None:
    backend.delete(key)
    backend.put_new(key, data)


def test_a_part_says_what_it_holds(backend):
    groups = [group_rows(3), group_rows(5, attempt=2, verdict="dropped", reason="zero_std")]
    part = write_part(backend, 7, 1, 4, groups)
    assert part.key == layout.part(7, 1, 4, checksum(backend.get(part.key)))
    file = open_part(NodeCache(backend), part.key)
    assert file.part == part and part.rows == 2 * SAMPLES
    first, second = part.groups
    assert (first.group_id, first.attempt, first.verdict, first.complete) == (3, 0, "kept", True)
    assert (second.attempt, second.reason, second.batch) == (2, "zero_std", 1)
    assert part.tokens == sum(s.response_length for group in groups for s in group.samples)
    for group, entry in zip(groups, part.groups, strict=True):
        rows = file.rows(entry.batch)
        expected = list(group.samples)
        for sample in expected:
            sample.attempt = group.attempt
        assert rows.to_samples() == expected
        assert rows_digest(rows.rows) == entry.digest


def test_row_columns_can_be_read_with_pyarrow_alone(tmp_path, backend):
    part = write_part(backend, 7, 1, 4, [group_rows(3)])
    table = pa.ipc.open_file(tmp_path / part.key).read_all()
    row = table.slice(1, 1).to_pylist()[0]
    expected = {"group_index": 3, "attempt": 0, "segment": 7, "data_epoch": 0, "position": 3}
    expected |= {"sample_position": 1, "verdict": "kept", "verdict_reason": None}
    assert {name: row[name] for name in expected} == expected
    assert row["grader_digest"] == "g" and row["index"] == 3 * SAMPLES + 1


def test_rows_do_not_depend_on_how_groups_share_parts(backend):
    together = write_groups(backend, 0, [group_rows(1), group_rows(2)])
    alone = [write_groups(backend, 0, [group_rows(g)], seq=g) for g in (1, 2)]
    digests = [part.groups[0].digest for part in alone]
    assert [entry.digest for entry in together.groups] == digests


def test_byte_ranges_hold_whole_record_batches(backend):
    part = write_groups(backend, 0, [group_rows(g) for g in range(3)])
    file = open_part(NodeCache(backend), part.key)
    for entry, (start, length) in zip(part.groups, file.byte_ranges(), strict=True):
        message = pa.ipc.read_message(backend.get_range(part.key, start, length))
        batch = pa.ipc.read_record_batch(message, file.rows(0).rows.schema)
        assert batch.equals(file.rows(entry.batch).rows)


def test_fan_out_siblings_share_their_rollouts_position(backend):
    samples = [finished_sample(1, i) for i in range(4)]
    for sample, rollout in zip(samples, (11, 11, None, 12), strict=True):
        sample.rollout_id = rollout
    group = group_rows(1)
    part = write_groups(backend, 0, [type(group)(1, 0, 0, 1, samples)])
    rows = open_part(NodeCache(backend), part.key).rows(0)
    assert rows.numbers("sample_position").tolist() == [0, 0, 1, 2]
    assert part.groups[0].rollouts == 3 and part.groups[0].rows == 4


def test_writing_the_same_part_again_is_no_error(backend):
    first = write_groups(backend, 0, [group_rows(1)])
    assert write_groups(backend, 0, [group_rows(1)]) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verdict": "fine"}, "verdict 'fine'"),
        ({"samples": []}, "no samples"),
        ({"samples": [finished_sample(9)]}, "sample 36 of group 9 is stored as part of group 1"),
    ],
)
def test_groups_that_contradict_themselves_are_refused(backend, change, message):
    group = group_rows(1)
    with pytest.raises(DataError, match=message):
        write_groups(backend, 0, [type(group)(**(vars(group) | change))])
    assert backend.list() == []


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "flipped": lambda data: data[:700] + bytes([data[700] ^ 1]) + data[701:],
    "flipped at the end": lambda data: data[:-1] + bytes([data[-1] ^ 0x80]),
    "longer": lambda data: data + b"\0",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_parts_are_found_and_moved_away(backend, kind):
    good = write_groups(backend, 0, [group_rows(1)])
    bad = write_groups(backend, 0, [group_rows(2)], seq=1)
    data = DAMAGE[kind](backend.get(bad.key))
    replace(backend, bad.key, data)
    cache = NodeCache(backend)
    with pytest.raises(DigestError, match="is damaged"):
        open_part(cache, bad.key)
    files, quarantined = list_parts(cache, 0)
    assert [file.part for file in files] == [good]
    assert [item.key for item in quarantined] == [bad.key] and "damaged" in quarantined[0].reason
    assert backend.get(layout.quarantine(bad.key)) == data
    assert list_parts(cache, 0)[1] == []


def test_a_missing_part_is_named(backend):
    key = layout.part(0, 0, 0, "0" * 32)
    with pytest.raises(MissingError, match="000000-000000"):
        open_part(NodeCache(backend), key)
    with pytest.raises(DataError, match="is no part"):
        open_part(NodeCache(backend), "groups/x")


def test_a_foreign_file_with_a_right_checksum_is_no_part(backend):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, pa.schema([("a", pa.int64())])):
        pass
    data = sink.getvalue().to_pybytes()
    key = layout.part(0, 0, 0, checksum(data))
    backend.put_new(key, data)
    with pytest.raises(DigestError, match="is no part of this program"):
        open_part(NodeCache(backend), key)


def test_parts_of_a_store_that_is_not_local_are_kept_on_the_node(tmp_path):
    backend = MemoryBackend()
    cache = NodeCache(backend, tmp_path)
    part = write_part(backend, 0, 0, 0, [group_rows(1)], cache)
    copy = tmp_path / part.key
    assert copy.read_bytes() == backend.get(part.key)
    copy.unlink()
    open_part(cache, part.key)
    assert copy.read_bytes() == backend.get(part.key)
    copy.write_bytes(b"damaged here only")
    assert open_part(cache, part.key).part == part
    assert list_parts(cache, 0)[1] == []


def test_a_store_without_a_cache_directory_is_read_directly():
    backend = MemoryBackend()
    part = write_groups(backend, 0, [group_rows(1)])
    assert open_part(NodeCache(backend), part.key).part == part


def test_single_columns_of_a_part_are_those_of_its_rows(backend):
    groups = [group_rows(3), group_rows(1)]
    file = open_part(NodeCache(backend), write_groups(backend, 0, groups).key)
    read = file.columns(["reward", "tokens"])
    assert len(read) == 2 and read[0].rows.schema.names == ["tokens", "reward"]
    for number, few in enumerate(read):
        whole = file.rows(number)
        assert few.tokens.values.tolist() == whole.tokens.values.tolist()
        assert few.tokens.offsets.tolist() == whole.tokens.offsets.tolist()
        assert few.numbers("reward").tolist() == whole.numbers("reward").tolist()
    mapped = file.columns(["tokens"])[0].tokens.values
    assert not mapped.flags.owndata and not mapped.flags.writeable, "a view of the file"
