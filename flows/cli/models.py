"""`slime models list | show NAME | export NAME | export --all DIR`."""

from __future__ import annotations

from pathlib import Path

from slime_core.config.flags import FlagParser, parse
from slime_core.doors.models import Preset, preset, presets
from slime_core.errors import ConfigError

SUFFIXES = {"bash": ".sh", "yaml": ".yaml"}


def main(arguments: list[str]) -> int:
    """Prints or writes presets."""
    parser = FlagParser(
        prog="slime models", description="Dimensions of known models, for Megatron's options."
    )
    parser.add_argument("what", choices=("list", "show", "export"))
    parser.add_argument("name", nargs="?", metavar="NAME", help="as `slime models list` shows it")
    parser.add_argument("--format", choices=tuple(SUFFIXES), help="bash (default) or yaml")
    parser.add_argument("--all", metavar="DIR", help="write every model to a file of this folder")
    parser.add_argument(
        "--overwrite", action="store_true", help="with --all: replace files that say otherwise"
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parsed = parse(parser, arguments)
    if parsed.what == "list" and (parsed.name or parsed.all or parsed.format):
        raise ConfigError("slime models list shows every model: give it nothing else")
    if parsed.what == "list":
        print("\n".join(_rows()))
    elif parsed.all and (parsed.what != "export" or parsed.name):
        raise ConfigError("--all writes every model: use it as `slime models export --all DIR`")
    elif parsed.what == "export" and parsed.all:
        _export_all(Path(parsed.all), parsed.format or "bash", parsed.overwrite)
    elif parsed.overwrite:
        raise ConfigError("--overwrite replaces files, which only `export --all DIR` writes")
    elif parsed.name is None:
        raise ConfigError(f"slime models {parsed.what} needs a NAME (`slime models list`)")
    else:
        chosen = preset(parsed.name)
        shown = parsed.format or ("yaml" if parsed.what == "show" else "bash")
        print(_text(chosen, shown), end="")
    return 0


def _rows() -> list[str]:
    width = max(map(len, presets()))
    rows = []
    for name, found in presets().items():
        size = "" if found.status == "later" else f"{found.parameters() / 1e9:.2f}B"
        waits = found.waits_for and f"later: {found.waits_for}"
        rows.append(f"{name:<{width}}  {size:<8} {waits}".rstrip())
    return rows


def _text(chosen: Preset, form: str) -> str:
    return chosen.bash() if form == "bash" else chosen.yaml()


def _export_all(folder: Path, form: str, overwrite: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_all(folder, form, overwrite)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error


def _write_all(folder: Path, form: str, overwrite: bool) -> None:
    """Writes all files or none: what stands there and says otherwise is somebody's own."""
    texts = {
        folder / f"{name}{SUFFIXES[form]}": _text(found, form)
        for name, found in presets().items()
        if found.status != "later"
    }
    changed = [
        path.name
        for path, text in texts.items()
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text
    ]
    if changed and not overwrite:
        raise ConfigError(
            f"{folder} has files of these names that say otherwise: {', '.join(changed)}; give "
            "another folder, or --overwrite to replace them"
        )
    for name, found in presets().items():
        if found.status == "later":
            print(f"{name}: left out, it waits for: {found.waits_for}")
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        print(path)
