"""Load of this machine as metrics, from a thread of its own."""

from __future__ import annotations

import logging
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable

import psutil

log = logging.getLogger(__name__)
INTERVAL_S = 10.0
WAITING_MOST = 2000
JOIN_S = 5.0
GPU_TIMEOUT_S = 5.0
GPU_QUERY = (
    "--query-gpu=index,utilization.gpu,memory.used,memory.total,power.draw",
    "--format=csv,noheader,nounits",
)
MIB_MEGABYTES = 2**20 / 1e6


class SystemMetrics(threading.Thread):
    """Measures at intervals and hands the numbers over; what cannot be sent waits, the newest
    2000 measurements of it.

    Args:
        send: takes Unix time and numbers by name; raises one of `away` where it must be tried
            again.
        away: errors after which the numbers wait.
    """

    def __init__(
        self,
        send: Callable[[float, dict[str, float]], None],
        away: tuple[type[Exception], ...],
        interval_s: float = INTERVAL_S,
    ) -> None:
        super().__init__(name="system metrics", daemon=True)
        self._send = send
        self._away = away
        self._interval_s = interval_s
        self._over = threading.Event()
        self._gpus = shutil.which("nvidia-smi")
        self._waiting: deque[tuple[float, dict[str, float]]] = deque(maxlen=WAITING_MOST)

    def finish(self) -> None:
        """Measures and sends a last time."""
        self._over.set()
        self.join(JOIN_S)

    def run(self) -> None:
        psutil.cpu_percent()  # the first call only begins an interval
        while not self._over.wait(self._interval_s):
            self._measure()
        self._measure()

    def _measure(self) -> None:
        numbers = measured()
        if self._gpus is not None:
            found = gpu_load(self._gpus)
            self._gpus = self._gpus if found else None  # a machine without one is asked once
            numbers |= found
        self._waiting.append((time.time(), numbers))
        try:
            while self._waiting:
                self._send(*self._waiting[0])
                self._waiting.popleft()
        except self._away as error:
            log.debug("system metrics wait: %s", error)


def measured() -> dict[str, float]:
    """The machine's load now, under the names that MLflow's page of system metrics knows, and the
    memory of the run's own processes."""
    memory, disk = psutil.virtual_memory(), psutil.disk_usage("/")
    return {
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/system_memory_usage_megabytes": memory.used / 1e6,
        "system/system_memory_usage_percentage": memory.percent,
        "system/disk_usage_percentage": disk.percent,
        "system/run_memory_megabytes": _run_memory_bytes() / 1e6,
    }


def gpu_load(program: str) -> dict[str, float]:
    """Use, memory and power of each NVIDIA GPU, as MLflow's page of system metrics names them.

    Args:
        program: nvidia-smi. What it does not know of a GPU is left out; nothing where it finds no
            GPU or does not answer.
    """
    try:
        done = subprocess.run(
            [program, *GPU_QUERY], capture_output=True, text=True, timeout=GPU_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.debug("nvidia-smi does not answer: %s", error)
        return {}
    found: dict[str, float] = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        index, *texts = (text.strip() for text in line.split(","))
        use, held, whole, power = (_number(text) for text in texts)
        values = {
            "utilization_percentage": use,
            "memory_usage_megabytes": None if held is None else held * MIB_MEGABYTES,
            "memory_usage_percentage": None if held is None or not whole else 100 * held / whole,
            "power_usage_watts": power,
        }
        found |= {f"system/gpu_{index}_{k}": v for k, v in values.items() if v is not None}
    return found


def _number(text: str) -> float | None:
    """None for `[N/A]` and the like."""
    try:
        return float(text)
    except ValueError:
        return None


def _run_memory_bytes() -> int:
    """Resident memory of this process and its descendants; shared pages count in each."""
    own = psutil.Process()
    total = 0
    for process in [own, *own.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total
