"""`slime doctor`: what this machine has, and what would go wrong on it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil

from flows.server import BATCHED_WRITERS, HOST, api_answers, configured_api_url
from slime_core import __version__
from slime_core.cluster.address import VARIABLE, checked_address
from slime_core.cluster.reach import cluster_facts
from slime_core.config.flags import FlagParser, parse
from slime_core.errors import ConfigError

PACKAGES = ("torch", "megatron-core", "ray", "prefect", "mlflow", "transformers", "pyarrow")
OPTIONAL = {"sglang": "engines on GPUs"}
PORTS = {4200: "Prefect's page", 5000: "MLflow's page"}
MEMORY_NEEDED_BYTES = 3 * 2**30
SHM_NEEDED_BYTES = 128 * 2**20
DISK_NEEDED_BYTES = 2 * 2**30
Mark = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """One line: bad stops a run, a note is worth knowing."""

    mark: Mark
    name: str
    text: str


def main(arguments: list[str]) -> int:
    """Prints the findings; 1 if one of them stops a run."""
    parser = FlagParser(prog="slime doctor", description=__doc__)
    parser.add_argument("--workspace", default="runs", help="folder that would hold the runs")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parse(parser, arguments)
    findings = [*versions(), *devices(), *folders(Path(options.workspace)), *ports(), *services()]
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.mark:<4}  {finding.name:<{width}}  {finding.text}")
    bad = [finding.name for finding in findings if finding.mark == "bad"]
    print(f"\nfix first: {', '.join(bad)}" if bad else "\nready to train")
    return 1 if bad else 0


def versions() -> Iterator[Finding]:
    """Python and the packages that a run imports."""
    supported = (3, 11) <= sys.version_info[:2] < (3, 13)
    text = platform.python_version() + ("" if supported else ": needs 3.11 or 3.12")
    yield Finding("ok" if supported else "bad", "python", text)
    yield Finding("ok", "slime-flow", __version__)
    for name in PACKAGES:
        try:
            yield Finding("ok", name, version(name))
        except PackageNotFoundError:
            yield Finding("bad", name, "is not installed: pip install -e . in the checkout")
    for name, purpose in OPTIONAL.items():
        try:
            yield Finding("ok", name, version(name))
        except PackageNotFoundError:
            yield Finding("note", name, f"is not installed; only needed for {purpose}")


def devices() -> Iterator[Finding]:
    """Processors, memory, GPUs."""
    yield Finding("ok", "cpu", f"{os.cpu_count()} cores")
    free = psutil.virtual_memory().available
    enough = free >= MEMORY_NEEDED_BYTES
    hint = "" if enough else f"; the quickstart takes {_gib(MEMORY_NEEDED_BYTES)}"
    yield Finding("ok" if enough else "note", "memory", f"{_gib(free)} available{hint}")
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    enough = shared >= SHM_NEEDED_BYTES
    hint = "" if enough else ": Ray needs 128 MiB (docker run --shm-size 1g)"
    yield Finding("ok" if enough else "bad", "/dev/shm", f"{_gib(shared)} free{hint}")
    yield _gpus()


def _gpus() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("note", "gpu", "none found (no nvidia-smi): trainer and engines use the CPU")
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return Finding("note", "gpu", f"nvidia-smi failed: {error}")
    return Finding("ok", "gpu", "; ".join(listed.stdout.strip().splitlines()))


def folders(workspace: Path) -> Iterator[Finding]:
    """Where a run writes."""
    for name, folder in {"workspace": workspace, "temporary": Path(tempfile.gettempdir())}.items():
        yield _writable(name, folder.absolute())


def _writable(name: str, folder: Path) -> Finding:
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding("bad", name, f"{existing} cannot be written: {reason}; use --workspace")
    mark: Mark = "ok" if free >= DISK_NEEDED_BYTES else "note"
    return Finding(mark, name, f"{folder} ({_gib(free)} free)")


def ports() -> Iterator[Finding]:
    """The loopback address, and the usual ports of the pages."""
    try:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
        yield Finding("ok", "loopback", f"{HOST} can be bound")
    except OSError as error:
        yield Finding("bad", "loopback", f"{HOST} cannot be bound: {error.strerror}")
    for port, purpose in PORTS.items():
        with socket.socket() as probe:
            taken = probe.connect_ex((HOST, port)) == 0
        text = f"in use: {purpose} gets another" if taken else f"free for {purpose}"
        yield Finding("note" if taken else "ok", f"port {port}", text)


def services() -> Iterator[Finding]:
    """Servers that the environment names."""
    chosen = configured_api_url()
    if chosen is None:
        yield Finding("ok", "prefect server", "each run starts its own, with data in the workspace")
    else:
        yield _prefect(*chosen)
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        yield Finding("ok", "mlflow store", "a database in the workspace")
    elif uri.startswith("http") and not _answers(f"{uri.rstrip('/')}/health"):
        yield Finding("note", "mlflow store", f"{uri} does not answer; metrics would wait for it")
    else:
        yield Finding("ok", "mlflow store", uri)
    if os.environ.get(VARIABLE):
        yield _ray()


def _ray() -> Finding:
    """The cluster that RAY_ADDRESS names."""
    try:
        address = checked_address(None, VARIABLE)
        if address is None:
            return Finding("ok", "ray", "each run starts its own")
        return Finding("ok", "ray", f"runs join the cluster {cluster_facts(address).describe()}")
    except ConfigError as error:
        return Finding("bad", "ray", str(error))


def _prefect(url: str, origin: str) -> Finding:
    if not api_answers(url, timeout_s=5):
        return Finding("bad", "prefect server", f"{url} (from {origin}) does not answer")
    if _writes_one_by_one(url):
        settings = " ".join(f"{name}={value}" for name, value in BATCHED_WRITERS.items())
        return Finding(
            "note", "prefect server",
            f"{url} runs on SQLite and writes events one by one, which costs about 2 s an "
            f"iteration: start it with {settings}",
        )  # fmt: skip
    return Finding("ok", "prefect server", f"{url} (from {origin})")


def _writes_one_by_one(url: str) -> bool:
    """True for a server on SQLite whose task-run recorder has its default batch size."""
    try:
        with urllib.request.urlopen(f"{url}/admin/settings", timeout=5) as response:
            server: dict[str, Any] = json.load(response)["server"]
    except (OSError, ValueError, KeyError):
        return False
    on_sqlite = "sqlite" in str(server["database"].get("connection_url") or "sqlite")
    return on_sqlite and int(server["services"]["task_run_recorder"].get("batch_size", 1)) == 1


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
