"""Log lines go to the file of the run that wrote them, and to no other."""

import logging
from pathlib import Path

from slime_core.run.logs import log_to_file


def test_a_run_that_has_ended_gets_no_lines_of_the_next(tmp_path: Path):
    log = logging.getLogger("slime_core.some.module")
    first, second = tmp_path / "a" / "driver.log", tmp_path / "b" / "driver.log"
    stop_first = log_to_file(first, "INFO")
    log.info("one")
    log.debug("not at this level")
    stop_first()
    stop_second = log_to_file(second, "DEBUG")
    log.debug("two")
    logging.getLogger("somebody.else").warning("not ours")
    stop_second()
    log.warning("nobody listens")
    assert first.read_text().splitlines()[0].endswith("INFO slime_core.some.module: one")
    assert len(first.read_text().splitlines()) == len(second.read_text().splitlines()) == 1
