"""A Ray cluster that tests start and end themselves, and the finding of what runs have there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from slime_core.cluster.place import Place
from slime_core.cluster.reach import cluster_facts
from slime_core.engines.launcher import free_port
from slime_core.errors import ConfigError
from slime_core.waits import poll

ROOT = Path(__file__).parents[1]
START_S = 240.0
END_S = 60.0
STRANGER = """
import os, ray, sys
ray.init(address=sys.argv[1], namespace=sys.argv[2], log_to_driver=False)
class Stranger:
    def pid(self): return os.getpid()
made = ray.remote(num_cpus=0)(Stranger).options(name="slime-run-of-others", lifetime="detached")
print(ray.get(made.remote().pid.remote()))
"""


class Probe:
    """An actor that tells where it is."""

    def __init__(self, place: Place) -> None:
        place.take()

    def seen(self) -> tuple[str, str]:
        """Its node, and the GPUs that it may use."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.environ["CUDA_VISIBLE_DEVICES"]


RUNS = ("ray::TrainerActor", "ray::RolloutActor", "ray::Supervisor", "slime_core.")


@dataclass
class Cluster:
    """One head node.

    Attributes:
        stranger: process of somebody else's actor there.
    """

    head: psutil.Process
    port: int
    client_port: int
    dashboard_port: int
    stranger: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def of_runs(self) -> list[psutil.Process]:
        """Every process there that works for a run of slime-flow."""
        found = []
        for process in self.head.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(process.cmdline())
                if process.pid != self.stranger and any(word in title for word in RUNS):
                    found.append(process)
        return found

    def wait_empty(self, seconds: float) -> None:
        """Until nothing of a run is there."""
        poll("runs to leave the cluster", seconds, lambda: None if self.of_runs() else True)

    @contextlib.contextmanager
    def second_node(self, gpus: int) -> Iterator[None]:
        """Another node on this machine, with pretended GPUs."""
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            *("--address", self.address, "--num-cpus", "2", "--num-gpus", str(gpus)),
            *("--object-store-memory", str(100 * 2**20)),
            *("--dashboard-agent-listen-port", "0", "--min-worker-port", "0"),
            *("--max-worker-port", "0"),
        ]
        node = psutil.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            poll("the second node", START_S, self._has_two_nodes, interval_s=0.2)
            yield
        finally:
            children = node.children(recursive=True)
            for process in [*children, node]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            node.wait(END_S)

    def _has_two_nodes(self) -> bool | None:
        return cluster_facts(self.address).nodes == 2 or None

    def is_whole(self) -> bool:
        """It answers, and others' work there goes on."""
        return cluster_facts(self.address).nodes == 1 and psutil.pid_exists(self.stranger)


@contextlib.contextmanager
def started() -> Iterator[Cluster]:
    """A cluster with a temporary folder and ports of its own."""
    folder = tempfile.mkdtemp(prefix="slime-head-")  # socket paths must be short
    ports = [free_port() for _ in range(3)]
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--temp-dir", folder, "--port", str(ports[0]), "--ray-client-server-port", str(ports[1])),
        *("--dashboard-host", "127.0.0.1", "--dashboard-port", str(ports[2])),
        *("--dashboard-agent-listen-port", "0", "--min-worker-port", "0"),
        *("--max-worker-port", "0", "--num-cpus", "2", "--object-store-memory", str(100 * 2**20)),
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    head = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    cluster = Cluster(psutil.Process(head.pid), *ports)
    try:
        poll("the cluster to answer", START_S, lambda: _answers(cluster.address), interval_s=0.2)
        run = [sys.executable, "-c", STRANGER, cluster.address, "others"]
        done = subprocess.run(run, capture_output=True, text=True, timeout=START_S)
        assert done.returncode == 0, done.stderr
        cluster.stranger = int(done.stdout.split()[-1])
        yield cluster
    finally:
        children = cluster.head.children(recursive=True)
        head.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(END_S)
        for process in [*children, cluster.head]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait(END_S)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(address: str) -> bool | None:
    try:
        return cluster_facts(address).nodes == 1 or None
    except ConfigError:
        return None
