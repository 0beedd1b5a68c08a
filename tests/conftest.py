"""Keeps every test off the user's own Prefect, MLflow and Ray settings."""

import atexit
import os
import shutil
import tempfile

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
