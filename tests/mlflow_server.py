"""A real `mlflow server` for tests, on the loopback address."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request

from slime_core.waits import poll


class MlflowServer:
    """`mlflow server` on a loopback port, started and killed by the test."""

    def __init__(self, folder) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self.start()

    def start(self) -> None:
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1",
                 "--port", str(self.port), "--workers", "1",
                 "--backend-store-uri", f"sqlite:///{self._folder}/server.db",
                 "--artifacts-destination", str(self._folder / "artifacts")],
                stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
            )  # fmt: skip

    def wait(self) -> None:
        def answers():
            try:
                return urllib.request.urlopen(f"{self.uri}/health", timeout=1).status == 200
            except OSError:
                return None

        poll("the MLflow server", 90, answers)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
