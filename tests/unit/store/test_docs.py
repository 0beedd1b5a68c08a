"""The page's own code reads a run with pyarrow and JSON alone."""

import re
from pathlib import Path

import pytest

from slime_core.store.cache import NodeCache
from slime_core.store.compaction import compact_segment
from tests.unit.store.runs import stored_run

PAGE = Path(__file__).parents[3] / "docs" / "store.md"


@pytest.mark.parametrize("compacts", [False, True])
def test_the_code_of_the_page_reads_a_run(tmp_path, compacts):
    run = stored_run(tmp_path, "a", 2)
    if compacts:
        assert compact_segment(NodeCache(run), 1) is not None
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert not re.search(r"slime_core|flows", code)
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    assert names["rewards_by_iteration"](tmp_path / "a") == {0: 0.5, 1: 0.5}
