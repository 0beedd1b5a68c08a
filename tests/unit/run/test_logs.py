"""Log lines go to the file of the run that wrote them, and to no other."""

import logging
import subprocess
import sys
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


def test_what_a_process_and_its_children_print_is_in_the_file(tmp_path: Path):
    code = """if True:
        import logging, os, pathlib, sys
        from slime_core.run.logs import print_to_file
        print("before")
        print_to_file(pathlib.Path(sys.argv[1]))
        print("printed")
        logging.getLogger("of.a.user").warning("warned")
        os.system("echo of a child")
        os._exit(0)  # killed: nothing is flushed at the end
    """
    path = tmp_path / "logs" / "trainer-0.out"
    path.parent.mkdir()
    path.write_text("of the start before\n")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("before\n", "")
    lines = path.read_text().splitlines()
    assert lines == ["of the start before", "printed", "warned", "of a child"]
