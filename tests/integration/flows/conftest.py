"""One Prefect server for the tests of this folder."""

import pytest
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.server import OwnServer


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Our own server process, with an empty database."""
    own = OwnServer.start(tmp_path_factory.mktemp("workspace"))
    own.wait_healthy(240)
    with temporary_settings({PREFECT_API_URL: own.api_url, PREFECT_CLIENT_MAX_RETRIES: 2}):
        yield own
        EventsWorker.drain_all(timeout=180)
    own.stop()
