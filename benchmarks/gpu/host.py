"""What a measurement was made on, and how a result is kept."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "megatron-core", "transformers", "sglang", "ray", "numpy")


def facts() -> dict[str, str]:
    """Device, driver and versions."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    card = _nvidia_smi("name,driver_version,memory.total").split(", ")
    return {
        "device": card[0],
        "driver": card[1] if len(card) > 1 else "",
        "memory_mib": card[-1].split(" ")[0],
        "python": platform.python_version(),
        "cores": str(os.cpu_count()),
        **versions,
    }


def used_mib() -> int:
    """GPU memory in use by all processes."""
    return int(_nvidia_smi("memory.used").split(" ")[0] or 0)


def _nvidia_smi(fields: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the flag that all measurements share."""
    made = argparse.ArgumentParser(description=doc, allow_abbrev=False)
    made.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for JSON results")
    return made


def keep(out: Path, name: str, result: dict[str, Any]) -> None:
    """Writes OUT/NAME.json."""
    out.mkdir(parents=True, exist_ok=True)
    body = {"name": name, "host": facts(), **result}
    (out / f"{name}.json").write_text(json.dumps(body, indent=1, default=str) + "\n")


def show(rows: list[tuple[str, Any]]) -> None:
    """Prints a two-column Markdown table."""
    print("| what | figure |\n| --- | --- |")
    for name, value in rows:
        print(f"| {name} | {value} |", flush=True)
