import ast
import datetime
import gzip
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.data.readers import ReadCounts, fingerprint, parse_data_path, read_rows
from slime_core.data.table import RowTable
from slime_core.errors import DataError

VECTORS = Path(__file__).parents[2] / "vectors"
EDGE_CASES = [json.loads(line) for line in (VECTORS / "edge_cases.jsonl").open(encoding="utf-8")]
READ_CASES = [row for row in EDGE_CASES if row["fn"] == "read_jsonl_edge"]


def values(spec, **options):
    return [row.values for row in read_rows(str(spec), **options)]


def write(folder, content, name="rows.jsonl"):
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("case", READ_CASES, ids=lambda case: case["input"]["case"])
def test_jsonl_vectors(case, tmp_path):
    path = write(tmp_path, ast.literal_eval(case["input"]["bytes_repr"]))
    # The source passes lines on that are not objects; here they are bad rows like broken ones.
    objects = [row for row in case["expected"] if isinstance(row, dict)]
    broken = case["input"]["case"] in ("json array line", "trailing garbage")
    if broken:
        with pytest.raises(DataError, match=r"rows\.jsonl, line 1: .*--max-bad-rows"):
            values(path)
    counts = ReadCounts()
    assert values(path, max_bad_rows=int(broken), counts=counts) == objects
    assert len(counts.bad) == int(broken)


BROKEN = {
    "not json": b"nope",
    "trailing garbage": b'{"a":1}x',
    "cut off": b'{"a":',
    "array": b"[1]",
    "bare number": b"3",
    "bare null": b"null",
    "latin-1": b'{"a":"\xe9"}',
    "utf-16": '{"a":1}'.encode("utf-16"),
    "lone surrogate": b'{"a":"\\ud800"}',
    "raw NUL": b'{"a":"x\0y"}',
    "only NUL": b"\0" * 64,
    "raw tab in string": b'{"a":"x\ty"}',
    "deep nesting": b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "nesting that the store cannot walk": b'{"a":' + b"[" * 300 + b"]" * 300 + b"}",
    "number of 5000 digits": b'{"a":' + b"9" * 5000 + b"}",
    "single quotes": b"{'a': 1}",
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_broken_line_names_file_and_line_or_is_counted(line, tmp_path):
    path = write(tmp_path, b'{"i":0}\n' + line + b'\n{"i":1}\n')
    for read in (values, lambda p, **o: [r.values for r in _all(RowTable(str(p), **o))]):
        with pytest.raises(DataError, match=r"rows\.jsonl, line 2: "):
            read(path)
        assert read(path, max_bad_rows=1) == [{"i": 0}, {"i": 1}]


def _all(table):
    return [table[index] for index in range(len(table))]


def test_more_bad_rows_than_allowed_raise_with_their_number(tmp_path):
    path = write(tmp_path, b'x\n{"i":0}\ny\nz\n')
    with pytest.raises(DataError, match=r"line 4: .*3 bad rows, more than --max-bad-rows 2"):
        values(path, max_bad_rows=2)


SOUND = {
    "byte order mark": (b'\xef\xbb\xbf{"a":1}\n', [{"a": 1}]),
    "mark in the middle (joined files)": (b'{"a":1}\n\xef\xbb\xbf{"a":2}\n', [{"a": 1}, {"a": 2}]),
    "crlf": (b'{"a":1}\r\n{"a":2}\r\n', [{"a": 1}, {"a": 2}]),
    "no final newline": (b'{"a":1}', [{"a": 1}]),
    "form feed and VT in text": (b'{"a":"x\\u000b\\u000cy"}', [{"a": "x\x0b\x0cy"}]),
    "escaped NUL": (b'{"a":"x\\u0000y"}', [{"a": "x\0y"}]),
    "surrogate pair": (b'{"a":"\\ud83d\\ude00"}', [{"a": "\U0001f600"}]),
    "text about surrogates": (b'{"a":"\\\\ud800"}', [{"a": "\\ud800"}]),
    "huge integer": (b'{"a":' + b"9" * 40 + b"}", [{"a": int("9" * 40)}]),
    "infinity": (b'{"a":-Infinity}', [{"a": float("-inf")}]),
    "empty file": (b"", []),
}


@pytest.mark.parametrize(("content", "expected"), SOUND.values(), ids=SOUND)
def test_unusual_but_sound_lines(content, expected, tmp_path):
    assert values(write(tmp_path, content)) == expected


def test_nan_stays_a_float(tmp_path):
    (row,) = values(write(tmp_path, b'{"a":NaN}\n'))
    assert row["a"] != row["a"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(rows=st.lists(st.dictionaries(st.text(), JSON, max_size=3), max_size=8), ascii=st.booleans())
def test_what_json_writes_is_read_back(rows, ascii, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(b"".join(json.dumps(row, ensure_ascii=ascii).encode() + b"\n" for row in rows))
    assert values(path) == rows


BOUND = st.none() | st.integers(-7, 7)


@given(start=BOUND, stop=BOUND)
def test_slices_are_pythons_and_count_good_rows(start, stop, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(b'{"i":0}\n\n{"i":1}\nnot json\n  \n{"i":2}\n{"i":3}')
    bounds = ["" if bound is None else bound for bound in (start, stop)]
    spec = f"{path}@[{bounds[0]}:{bounds[1]}]"
    expected = [0, 1, 2, 3][start:stop]
    assert [row["i"] for row in values(spec, max_bad_rows=1)] == expected
    if expected:
        assert [row.values["i"] for row in _all(RowTable(spec, max_bad_rows=1))] == expected


def test_rows_after_the_slice_are_not_looked_at(tmp_path):
    spec = f"{write(tmp_path, b'{}' + bytes([10]) + b'broken')}@[:1]"
    assert values(spec) == [{}]
    assert len(RowTable(spec)) == 1


@pytest.mark.parametrize("spec", ["a.jsonl@[1]", "a.jsonl@[a:b]", "a.jsonl@[1:2:3]", "a.jsonl@[1:"])
def test_another_slice_form_is_refused(spec):
    with pytest.raises(DataError, match=r"file@\[start:stop\]"):
        parse_data_path(spec)


def test_missing_file_suggests_a_similar_name(tmp_path):
    write(tmp_path, b"{}", "train.jsonl")
    with pytest.raises(DataError, match=r"no such file; did you mean .*train\.jsonl\?"):
        list(read_rows(str(tmp_path / "trian.jsonl")))
    with pytest.raises(DataError, match=r"folder .* does not exist"):
        list(read_rows(str(tmp_path / "no" / "train.jsonl")))


def test_missing_is_said_at_the_call_not_at_the_first_row(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_rows(str(tmp_path / "missing.jsonl"))


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a", "a.jsonl.bz2"])
def test_unknown_formats_name_the_known_ones(name, tmp_path):
    with pytest.raises(DataError, match=r"unknown format; \.jsonl"):
        read_rows(str(write(tmp_path, b"{}", name)))


def test_a_folder_is_refused(tmp_path):
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        read_rows(str(tmp_path / "d.jsonl"))


def test_compressed_files_equal_plain_ones(tmp_path):
    content = b"".join(b'{"i":%d}\n' % i for i in range(5000))
    plain = write(tmp_path, content)
    packed = [
        # Two members, as appending to a .gz makes them.
        write(tmp_path, gzip.compress(content[:99]) + gzip.compress(content[99:]), "r.jsonl.gz"),
        write(tmp_path, pa.compress(content, codec="zstd", asbytes=True), "r.jsonl.zst"),
    ]
    for path in packed:
        assert values(path) == values(plain)
        table = RowTable(str(path))
        assert [table[i].values["i"] for i in (4999, 0, 17)] == [4999, 0, 17]


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.jsonl.zst", "r.parquet"])
def test_damaged_files_are_named(name, tmp_path):
    whole = gzip.compress(b'{"i":1}\n' * 9999)
    for content in (b"not at all", whole[: len(whole) // 2]):
        path = write(tmp_path, content, name)
        with pytest.raises(DataError, match=name):
            values(path)
        with pytest.raises(DataError, match=name):
            RowTable(str(path))


def test_parquet_rows_nulls_and_random_access(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "label": "1", "metadata": {"k": 1}},
        {"prompt": None, "label": None, "metadata": None},
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows * 400), path, row_group_size=300)
    assert values(path) == rows * 400
    assert values(f"{path}@[-3:-1]") == rows[1:] + rows[:1]
    table = RowTable(f"{path}@[1:]")
    assert [table[index].number for index in (0, 798)] == [2, 800]
    assert table[798].values == rows[1]


def test_times_and_exact_numbers_of_a_table_become_what_json_would_hold(tmp_path):
    when = datetime.datetime(2020, 1, 2, 3, 4, 5)
    row = {"label": Decimal("1.50"), "metadata": {"at": [when], "day": when.date(), "raw": b"\xff"}}
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    plain = {
        "label": "1.50",
        "metadata": {"at": ["2020-01-02T03:04:05"], "day": "2020-01-02", "raw": b"\xff"},
    }
    assert values(path) == [plain] and RowTable(str(path))[0].values == plain


def test_a_table_of_several_files_keeps_their_order(tmp_path):
    one = write(tmp_path, b'{"i":0}\n{"i":1}\n', "one.jsonl")
    two = write(tmp_path, b'{"i":2}\n', "two.jsonl")
    table = RowTable([str(one), str(two)])
    assert [row.values["i"] for row in _all(table)] == [0, 1, 2]
    with pytest.raises(IndexError):
        table[3]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"broken\n"])
def test_a_file_without_prompts_is_refused(content, tmp_path):
    path = write(tmp_path, content)
    with pytest.raises(DataError, match=r"rows\.jsonl holds no prompts: "):
        RowTable(str(path), max_bad_rows=5)


def test_a_slice_without_rows_is_not_called_an_empty_file(tmp_path):
    path = write(tmp_path, b'{"i":0}\n' * 5)
    for part in ("[10:20]", "[3:2]", "[:-10]"):
        with pytest.raises(DataError, match="holds no prompts: no row of the file lies in the sl"):
            RowTable(f"{path}@{part}")


def test_a_file_that_shrinks_in_use_is_named(tmp_path):
    path = write(tmp_path, b'{"i":0}\n{"i":1}\n')
    table = RowTable(str(path))
    path.write_bytes(b'{"i":0}\n')
    with pytest.raises(DataError, match=r"line 2: the file changed"):
        table[1]


def test_fingerprint_follows_content_and_slice_not_place(tmp_path):
    one = write(tmp_path, b'{"i":0}\n', "one.jsonl")
    moved = write(tmp_path, b'{"i":0}\n', "moved.jsonl")
    other = write(tmp_path, b'{"i":1}\n', "other.jsonl")
    assert fingerprint([str(one)]) == fingerprint([str(moved)])
    prints = {
        fingerprint(specs)
        for specs in (
            [str(one)],
            [str(other)],
            [f"{one}@[:1]"],
            [str(one), str(other)],
            [str(other), str(one)],
        )
    }
    assert len(prints) == 5
