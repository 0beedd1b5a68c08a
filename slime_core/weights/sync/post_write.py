"""A function of the user's between writing a version's folder and loading it into engines, such as
to publish the folder where the engines read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import DeadlineError, PluginError, SlimeError
from slime_core.plugins.load import check_signature, is_async, load
from slime_core.plugins.threads import in_thread
from slime_core.plugins.user_code import no_exit, raised
from slime_core.waits import within

POST_WRITE = "custom_update_weight_post_write_path"


@dataclass(frozen=True)
class EngineAddress:
    """An engine that loads the folder next, as the function sees it."""

    name: str
    url: str

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"rollout_engines have name and url, not {name}: engines are HTTP servers, no actors"
        )


def load_post_write(path: str) -> Callable[..., Any]:
    """The function.

    Raises:
        PluginError: it cannot be loaded, or called as slime calls it.
    """
    function = load(path)
    check_signature(function, path, ("args", "version_dir", "rollout_engines"))
    return function


@dataclass(frozen=True)
class PostWrite:
    """The function of a configuration.

    Attributes:
        args: the configuration as plug-ins see it.
        engines: name -> address of those that are up.
        limit_s: deadline of a call.
    """

    path: str
    args: Any
    engines: Callable[[], Mapping[str, str]]
    limit_s: float

    async def __call__(self, folder: str) -> None:
        """Tells it of a complete folder; a plain function runs in a thread of its own.

        Raises:
            PluginError: it raised, was late, returned something to await or took the folder away.
        """
        function, shown = load_post_write(self.path), f"{POST_WRITE} {self.path}"
        engines = [EngineAddress(name, url) for name, url in sorted(self.engines().items())]

        def plain() -> Any:
            with no_exit(shown):
                return function(self.args, folder, engines)

        async def awaited() -> Any:
            with no_exit(shown):
                return await function(self.args, folder, engines)

        call = awaited() if is_async(function) else in_thread(shown, plain)
        try:
            result = await within(shown, self.limit_s, call)
        except DeadlineError as error:
            raise PluginError(
                f"{shown} did not end within {self.limit_s:g} s (half of sync_timeout_s)"
            ) from error
        except SlimeError:
            raise
        except Exception as error:
            raise PluginError(f"{shown} raised {raised(error)}") from error
        if inspect.isawaitable(result):
            raise PluginError(f"{shown} returned something to await: make it `async def` itself")
        if not Path(folder).is_dir():
            raise PluginError(f"{shown} removed {Path(folder).name}, which engines load next")
