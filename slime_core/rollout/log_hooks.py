"""Functions of the user's that are told what was generated, such as to log it somewhere.

They see copies that were read from the store, so they change nothing; what they return is not
used, since metrics are always kept. One that fails or takes too long is logged and costs nothing
else. A run that was killed between a segment's seal and its end tells them once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_core.config.tree import RunConfig
from slime_core.errors import DeadlineError, PluginError, SlimeError
from slime_core.plugins.load import check_signature, is_async, load
from slime_core.plugins.threads import in_thread
from slime_core.plugins.user_code import no_exit, raised
from slime_core.rollout.outcome import columns
from slime_core.rollout.seen_source import SeenSource
from slime_core.sample import Sample
from slime_core.store.cache import NodeCache
from slime_core.store.parts import KEPT
from slime_core.store.seal import Seal, StoredGroup, open_groups
from slime_core.waits import within

log = logging.getLogger(__name__)
LOG_TIMEOUT_S = 60.0
CALLS = {
    "custom_rollout_log_function_path": (
        "rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time",
    ),
    "rollout_all_samples_process_path": ("args", "all_samples", "data_source"),
    "custom_eval_rollout_log_function_path": ("rollout_id", "args", "data", "extra_metrics"),
}  # fmt: skip
"""How slime calls each."""


def load_log_hook(flag: str, path: str) -> Callable[..., Any]:
    """The function of a flag in CALLS.

    Raises:
        PluginError: it cannot be loaded, or called as slime calls it.
    """
    function = load(path)
    check_signature(function, path, CALLS[flag])
    return function


def asked(config: RunConfig) -> dict[str, str]:
    """Flag -> import path, of those that are set."""
    given = {name: getattr(config.rollout, name, None) or getattr(config.eval, name, None)
             for name in CALLS}  # fmt: skip
    return {name: path for name, path in given.items() if path}


async def tell(flag: str, path: str, arguments: tuple[Any, ...], timeout_s: float) -> None:
    """Calls a function, a plain one in a thread of its own.

    Raises:
        PluginError: it raised.
        DeadlineError: it did not return in time.
    """
    function = load_log_hook(flag, path)

    def plain() -> Any:
        with no_exit(path):
            return function(*arguments)

    async def awaited() -> Any:
        with no_exit(path):
            return await function(*arguments)

    try:
        call = awaited() if is_async(function) else in_thread(path, plain)
        await within(f"{path} ({flag})", timeout_s, call)
    except (PluginError, DeadlineError):
        raise
    except Exception as error:
        raise PluginError(f"{path} raised {raised(error)}") from error


@dataclass
class LogHooks:
    """The functions of a configuration.

    Attributes:
        paths: flag -> import path.
        timeout_s: deadline of one call.
        failed: calls that failed or were late.
    """

    paths: dict[str, str]
    args: Any
    timeout_s: float = LOG_TIMEOUT_S
    failed: int = field(default=0, init=False)

    def check(self) -> None:
        """Loads all of them.

        Raises:
            PluginError: see load_log_hook.
        """
        for flag, path in self.paths.items():
            load_log_hook(flag, path)

    async def segment(
        self, cache: NodeCache, seal: Seal, seconds: float, source: SeenSource
    ) -> None:
        """Tells of a segment that was sealed, with the metrics that its seal holds.

        Args:
            seconds: that the segment took; NaN where it was made before this start.
        """
        k, own, every = seal.segment, *list(CALLS)[:2]

        def of_batch() -> tuple[Any, ...]:
            kept = [group for group in seal.groups if group.entry.verdict == KEPT]
            samples = [one for group in _rows(cache, kept) for one in group]
            return k, self.args, samples, dict(seal.metrics), seconds

        await self._call(own, k, of_batch)
        await self._call(every, k, lambda: (self.args, _rows(cache, seal.groups), source))

    async def evaluation(
        self, dataset: str, version: int, samples: Sequence[Sample], metrics: dict[str, float]
    ) -> None:
        """Tells of one dataset's evaluation.

        Args:
            version: iterations in the weights, which is slime's rollout_id here.
        """

        def of_dataset() -> tuple[Any, ...]:
            copies = [Sample.from_dict(sample.to_dict()) for sample in samples]
            return version, self.args, {dataset: columns(copies)}, dict(metrics)

        await self._call(list(CALLS)[2], version, of_dataset)

    async def _call(self, flag: str, number: int, given: Callable[[], tuple[Any, ...]]) -> None:
        """Calls the function of a flag, where there is one.

        Args:
            given: makes its arguments, in a thread: they may be read from the store.
        """
        if flag not in self.paths:
            return
        try:
            arguments = await asyncio.to_thread(given)
            await tell(flag, self.paths[flag], arguments, self.timeout_s)
        except (SlimeError, OSError) as error:
            self._missed(flag, number, str(error))

    def _missed(self, flag: str, number: int, why: str) -> None:
        self.failed += 1
        log.error("%s was not told of %d (%d missed so far): %s", flag, number, self.failed, why)


def _rows(cache: NodeCache, groups: Sequence[StoredGroup]) -> list[list[Sample]]:
    """The stored samples of groups."""
    files = open_groups(cache, list(groups))
    places = (files[group.entry.group_id, group.entry.attempt] for group in groups)
    return [file.rows(batch).to_samples() for file, batch in places]
