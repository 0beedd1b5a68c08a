"""Which layer may import what, by reading every file and by loading modules in a new process."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOMES = {
    "prefect": ("flows/", "tasks/", "blocks/"),
    "ray": ("slime_core/cluster/",),
    "megatron": ("slime_core/megatron/",),
    "sglang": ("slime_core/engines/",),
    "fsspec": ("slime_core/store/",),
    "mlflow": ("slime_core/tracking/",),
}
HEAVY = ("torch", "transformers", "ray", "prefect", "mlflow", "megatron", "sglang")
LIGHT = ("slime_core.config", "slime_core.run", "slime_core.stages", "slime_core.plugins")


def python_files() -> list[Path]:
    return [
        path
        for package in ("flows", "tasks", "blocks", "slime_core")
        for path in (ROOT / package).rglob("*.py")
    ]


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in memory after a statement in a new process."""
    code = (
        f"{statement}\nimport sys; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def modules_below(packages: tuple[str, ...]) -> list[str]:
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in python_files()]
    return sorted(name for name in names if name.startswith(packages) and "__init__" not in name)


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_in_its_own_folder_only(library):
    strangers = [
        str(path.relative_to(ROOT))
        for path in python_files()
        if library in imported(path) and not str(path.relative_to(ROOT)).startswith(HOMES[library])
    ]
    assert strangers == []


def test_the_layers_point_one_way():
    order = ("slime_core", "blocks", "tasks", "flows")
    for path in python_files():
        level = order.index(path.relative_to(ROOT).parts[0])
        assert not imported(path) & set(order[level + 1 :]), path


def test_configuration_run_stages_and_plugins_load_without_torch_and_transformers():
    statement = "import " + ", ".join(
        [*modules_below(LIGHT), "slime_core.store.layout", "slime_core.data.readers"]
    )
    assert not loaded_by(statement) & {"torch", "transformers"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"]])
def test_help_and_version_load_nothing_heavy(arguments):
    statement = (
        f"from flows.cli.main import main\ntry: main({arguments!r})\nexcept SystemExit: pass"
    )
    assert not loaded_by(statement) & set(HEAVY)


def test_version_and_help_do_not_even_load_the_configuration():
    assert "pydantic" not in loaded_by("from flows.cli.main import main; main(['--version'])")
