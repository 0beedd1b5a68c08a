"""Objects by import path: `pkg.mod:obj`, `pkg.mod.obj`, `path/file.py:obj` or a bare `file.py`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_core.errors import PluginError
from slime_core.near import nearest
from slime_core.plugins import slime_alias

FORMS = "pkg.module:name, pkg.module.name, path/file.py:name or path/file.py"


def load(path: str, names: Sequence[str] = ()) -> Any:
    """Loads what an import path names; the same path gives the same object.

    Args:
        path: one of the four forms. Files are taken relative to the working directory.
        names: for a bare file, the names looked for, in this order; without a match its only
            public function is taken.

    Raises:
        PluginError: file, module or name do not exist, or the module's own code fails.
    """
    slime_alias.install()
    return _load(path.strip(), tuple(names))


def check_signature(
    function: Any,
    path: str,
    call: Sequence[str],
    *,
    must_be_async: bool = False,
    must_be_plain: bool = False,
) -> None:
    """Checks that a hook can be called with the given arguments.

    Args:
        function: what `load` gave.
        path: how the user named it, for the message.
        call: the arguments of the call; a name with a trailing "=" is passed by keyword.
        must_be_async: the hook is awaited.
        must_be_plain: the hook is not awaited: calling an `async def` or a generator would run
            nothing of it.

    Raises:
        PluginError: it is not callable, not async or plain as it must be, or its parameters do not
            fit the call.
    """
    shown = ", ".join(name + "..." if name.endswith("=") else name for name in call)
    if not callable(function):
        kind = type(function).__name__
        raise PluginError(f"{path} is of type {kind}; a function({shown}) is needed")
    if must_be_async and not is_async(function):
        raise PluginError(f"{path} must be `async def`, since it is awaited")
    if must_be_plain and is_async(function):
        raise PluginError(f"{path} must be a plain `def`: nothing awaits it")
    if must_be_plain and _yields(function):
        raise PluginError(f"{path} must return instead of `yield`: nothing of it would run")
    positional = [None for name in call if not name.endswith("=")]
    keywords = {name[:-1]: None for name in call if name.endswith("=")}
    try:
        signature = inspect.signature(function)
    except ValueError:
        return
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        raise PluginError(
            f"{path}{signature} does not fit: it is called as ({shown}); {error}"
        ) from error


def accepts(function: Callable[..., Any], keyword: str) -> bool:
    """Whether a function names this keyword argument; **kwargs alone does not ask for it."""
    try:
        parameter = inspect.signature(function).parameters.get(keyword)
    except ValueError:
        return False
    return parameter is not None and parameter.kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )


def is_async(function: Any) -> bool:
    """Whether calling it gives an awaitable: a coroutine function or an object with such a call."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def _yields(function: Any) -> bool:
    own = (function, getattr(function, "__call__", None))  # noqa: B004
    return any(inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f) for f in own)


def source_digest(loaded: Any) -> str:
    """sha256 (hex) of the file that defines an object, "" where it has none."""
    target = loaded if inspect.isfunction(loaded) or inspect.isclass(loaded) else type(loaded)
    try:
        file = inspect.getsourcefile(target)
    except TypeError:
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


@lru_cache(maxsize=256)
def _load(path: str, names: tuple[str, ...]) -> Any:
    file, separator, name = path.rpartition(":")
    if not separator:
        file, name = path, ""
    if file.endswith(".py"):
        module = _file_module(file)
        return _attribute(module, name, path) if name else _only_function(module, path, names)
    if separator:
        module_name, attribute = file, name
    else:
        module_name, _, attribute = path.rpartition(".")
    if not module_name or not attribute:
        raise PluginError(f"{path!r} is not an import path; use {FORMS}")
    return _attribute(_named_module(module_name, path), attribute, path)


def _file_module(file: str) -> ModuleType:
    """Runs a file as a module of its own; its folder joins the end of the import path."""
    location = Path(file).expanduser().resolve()
    if not location.is_file():
        where = f" (looked for {location}; in a YAML, begin with ./ for the folder of that YAML)"
        raise PluginError(f"{file}: no such file{'' if Path(file).is_absolute() else where}")
    mark = hashlib.sha256(str(location).encode()).hexdigest()[:10]
    name = f"slime_plugin_{location.stem}_{mark}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, location)
    if spec is None or spec.loader is None:
        raise PluginError(f"{file} cannot be loaded as Python")
    if str(location.parent) not in sys.path:
        sys.path.append(str(location.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _failed(file, error) from error
    return module


def _named_module(name: str, path: str) -> ModuleType:
    """Imports a module; the working directory counts as a place for modules."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing and (name == missing or name.startswith(missing + ".")):
            raise PluginError(
                f"{path}: no module named {missing!r}; install it, start from its folder, "
                "or give the file as path/file.py:name"
            ) from error
        raise _failed(path, error) from error
    except BaseException as error:
        raise _failed(path, error) from error


def _failed(path: str, error: BaseException) -> BaseException:
    """A PluginError for what the module's own code raised; Ctrl-C stays Ctrl-C."""
    if isinstance(error, (KeyboardInterrupt, PluginError)):
        return error
    return PluginError(f"{path} raised {type(error).__name__} when it was imported: {error}")


def _attribute(module: ModuleType, dotted: str, path: str) -> Any:
    value: Any = module
    for name in dotted.split("."):
        if not hasattr(value, name):
            close = nearest(name, [item for item in vars(value) if not item.startswith("_")])
            hint = f"; did you mean {close}?" if close else f"; it has {_listed(_own(value))}"
            raise PluginError(f"{path}: it has no {name!r}{hint}")
        value = getattr(value, name)
    return value


def _only_function(module: ModuleType, path: str, names: tuple[str, ...]) -> Any:
    for name in names:
        if callable(getattr(module, name, None)):
            return getattr(module, name)
    own = _own(module)
    coroutines = {name: value for name, value in own.items() if is_async(value)}
    for candidates in (coroutines, own):
        if len(candidates) == 1:
            return next(iter(candidates.values()))
    wanted = f" named {' or '.join(names)}" if names else ""
    raise PluginError(
        f"{path} has {_listed(own)} and no single function{wanted}; write {path}:name"
    )


def _own(module: Any) -> dict[str, Any]:
    """The public functions that a module defines itself."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and inspect.isfunction(value)
        and value.__module__ == getattr(module, "__name__", None)
    }


def _listed(names: Any) -> str:
    shown = sorted(names)[:12]
    return ", ".join(shown) if shown else "nothing public"
