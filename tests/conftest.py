"""Keeps every test off the user's own Prefect, MLflow and Ray settings."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Generator

import pytest

FOLDER = tempfile.mkdtemp(prefix="slime-tests-")
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
os.environ["PREFECT_HOME"] = f"{FOLDER}/prefect"
for name in ("PREFECT_API_URL", "PREFECT_PROFILE", "MLFLOW_TRACKING_URI", "RAY_ADDRESS"):
    os.environ.pop(name, None)
os.environ |= {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logged goes to another process, which takes text that is UTF-8 only."""
    report = yield
    report.sections = [
        (title, text.encode("utf-8", "backslashreplace").decode("utf-8"))
        for title, text in report.sections
    ]
    return report
