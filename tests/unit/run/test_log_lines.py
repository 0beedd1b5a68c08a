"""Log files of a run's processes, read while they grow."""

from datetime import UTC, datetime

from slime_core.run import log_lines
from slime_core.run.log_lines import LogFiles, LogLine, chosen, parse

OURS = "2026-11-30 00:00:{:02d},250 {} slime_core.cluster: {}\n"


def test_lines_of_ours_and_of_other_programs():
    text = (
        OURS.format(1, "WARNING", "a: b")
        + "Traceback:\n  why\n"
        + "[2026-11-30 00:00:02] INFO: Prefill batch, ERROR rate 0\n"
    )
    warning, other = parse("engine-0", text)
    assert (warning.level, warning.logger) == (30, "slime_core.cluster")
    assert warning.message == "a: b\nTraceback:\n  why"
    local = datetime(2026, 11, 30, 0, 0, 1, 250_000).astimezone(UTC)
    assert warning.time == local
    assert other.logger == "engine-0" and other.message.startswith("[2026")


def test_growing_files_are_read_once_by_time_and_only_whole_lines(tmp_path):
    files = LogFiles(tmp_path, ("trainer", "engine"))
    (tmp_path / "trainer-0.log").write_text(OURS.format(2, "INFO", "second"))
    (tmp_path / "engine-0.log").write_text(OURS.format(1, "INFO", "first") + "2026-11-30 00:")
    (tmp_path / "driver.log").write_text(OURS.format(1, "INFO", "not asked for"))
    assert [line.message for line in files.read()] == ["first", "second"]
    assert files.read() == []
    with (tmp_path / "engine-0.log").open("a") as file:
        file.write("00:03,000 INFO slime_core.engines: third\n")
    assert [(line.source, line.message) for line in files.read()] == [("engine-0", "third")]


def test_what_stands_there_before_can_be_left_out(tmp_path):
    (tmp_path / "trainer-0.log").write_text(OURS.format(1, "INFO", "of the run before"))
    files = LogFiles(tmp_path, ("trainer",))
    files.skip()
    assert files.read() == []


def test_a_file_that_grows_too_fast_is_read_from_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(log_lines, "READ_MOST_BYTES", 200)
    line = OURS.format(1, "INFO", "x" * 40)
    (tmp_path / "trainer-0.log").write_text(line * 10 + OURS.format(9, "INFO", "newest"))
    files = LogFiles(tmp_path, ("trainer",))
    assert files.read()[-1].message == "newest"
    assert files.skipped_bytes == len(line) * 10 + len(OURS.format(9, "INFO", "newest")) - 200
    assert files.read() == [] and files.skipped_bytes == 0


def test_the_gravest_lines_stay_in_their_order():
    at = datetime(2026, 11, 30, tzinfo=UTC)
    lines = [LogLine("t", at, level, "l", str(i)) for i, level in enumerate([20, 40, 20, 30, 20])]
    kept, left_out = chosen(lines, 3)
    assert [line.message for line in kept] == ["0", "1", "3"] and left_out == 2
    assert chosen(lines, 0) == ([], 5) and chosen(lines, 9) == (lines, 0)
