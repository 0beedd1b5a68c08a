"""What several tests of the whole product share."""

import pytest

from tests.e2e.services import Services


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    """`slime up` in a workspace of its own, for the tests of one file."""
    made = Services(tmp_path_factory.mktemp("workspace"))
    made.slime("up", "--prefect-port", "0", "--mlflow-port", "0")
    yield made
    made.slime("down")
