"""A resume takes the configuration of what was trained last."""

import pytest

from slime_core.config.fields import numeric_digest
from slime_core.errors import ConfigError
from slime_core.run.identity import record_config
from slime_core.run.recorded import last_config
from slime_core.store import layout
from slime_core.store.backend import open_backend
from slime_core.store.documents import put_document
from tests.unit.config.trees import small


@pytest.fixture
def run(tmp_path):
    return open_backend(str(tmp_path))


def trained(run, k, config):
    put_document(run, layout.ledger(k), {"iteration": k, "numeric": numeric_digest(config)})


def test_the_last_iteration_decides_and_not_the_order_of_recording(run):
    first, second = small(lr=1e-3), small(lr=1e-4)
    for config in (first, second, first):
        record_config(run, config)
    trained(run, 0, second)
    trained(run, 1, first)
    assert last_config(run, {}) == first


def test_flags_go_over_it(run):
    record_config(run, small(lr=1e-3))
    assert last_config(run, {"lr": 0.5}).train.lr == 0.5


def test_a_run_without_iterations_has_what_was_recorded(run):
    with pytest.raises(ConfigError, match="holds no configuration"):
        last_config(run, {})
    record_config(run, small(lr=1e-3))
    assert last_config(run, {}) == small(lr=1e-3)
