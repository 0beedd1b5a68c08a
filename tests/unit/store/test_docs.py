"""The page that explains the store holds code that reads one."""

import re
from pathlib import Path

from slime_core.store.backend import open_backend
from slime_core.store.ledger import initial_state
from tests.unit.store.builders import finished_sample, run_iteration

PAGE = Path(__file__).parents[3] / "docs" / "store.md"


def test_the_pages_code_reads_a_run(tmp_path):
    backend = open_backend(str(tmp_path))
    state, seal = initial_state("weights"), ""
    for k in range(3):
        state, seal = run_iteration(backend, k, state, seal)
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    names: dict = {}
    exec(compile(block[1], str(PAGE), "exec"), names)
    expected = finished_sample(0, 0).reward, finished_sample(0, 1).reward
    assert names["rewards_by_iteration"](tmp_path) == dict.fromkeys(range(3), sum(expected) / 2)
