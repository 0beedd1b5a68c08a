"""The weight-sync state machine: SERVING(v) -> ... -> SERVING(v+1).

Rollout code never sees half-loaded weights: the gate closes, every request is answered (aborted
ones keep their prefix and continue later), the new bytes are loaded, and an engine serves again
only after it has echoed the new version and reproduced the trainer's canary log-probs. An engine
that fails is quarantined, never set back and never left behind.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from dataclasses import dataclass, field
from typing import Protocol

from slime_core.engines.client import EngineClient
from slime_core.errors import EngineError, SlimeError
from slime_core.waits import Deadline, apoll, within
from slime_core.weights.sync.canary import CanaryReading, largest_gap

log = logging.getLogger(__name__)
QUIET_TIMEOUT_S = 60.0
TRANSFERS_PER_ENGINE = 2


class SyncState(enum.Enum):
    """Where a sync, or one engine in it, stands; logged and named in errors."""

    SERVING = "serving"
    PREPARE = "prepare"
    GATED = "gated"
    QUIET = "quiet"
    TRANSFER = "transfer"
    VERIFY = "verify"
    COMMIT = "commit"


class Gate(Protocol):
    """Stops and starts new generation requests in every rollout worker."""

    async def close(self) -> None: ...
    async def open(self) -> None: ...


class Transport(Protocol):
    """Moves one version of the weights into one engine."""

    async def prepare(self, version: str) -> None:
        """Readies the bytes while the engines still serve the old version."""
        ...

    async def send(self, client: EngineClient, version: str) -> None:
        """Loads the prepared bytes into a quiet engine, without asking it for a flush."""
        ...

    async def finish(self, version: str) -> None:
        """Frees what the sync no longer needs."""
        ...


@dataclass(frozen=True)
class SyncOutcome:
    """What a sync did.

    Attributes:
        version: the version now served.
        canary: largest difference of trainer and engine log-probs over the engines that serve.
        serving: names of the engines that serve it.
        quarantined: engine name -> why it was taken out.
    """

    version: str
    canary: float
    serving: tuple[str, ...]
    quarantined: dict[str, str] = field(default_factory=dict)


class WeightSync:
    """Runs one sync over the engines of a fleet.

    Args:
        gate: of all rollout workers.
        transport: how bytes travel.
        timeout_s: deadline of the whole sync.
        tolerance: largest allowed canary difference (natural log units).
        min_engines: engines that must serve the new version, or the sync fails.
    """

    def __init__(
        self,
        gate: Gate,
        transport: Transport,
        timeout_s: float,
        tolerance: float,
        min_engines: int = 1,
    ) -> None:
        self.gate = gate
        self.transport = transport
        self.timeout_s = timeout_s
        self.tolerance = tolerance
        self.min_engines = min_engines
        self.state = SyncState.SERVING
        self._states: dict[str, SyncState] = {}

    async def run(
        self, version: str, canary: CanaryReading, clients: dict[str, EngineClient]
    ) -> SyncOutcome:
        """Brings the engines to `version`.

        Args:
            version: the new weight version.
            canary: the trainer's log-probs under the new weights.
            clients: engine name -> client, of the engines that are alive.

        Raises:
            EngineError: fewer than `min_engines` serve the new version; the gate stays closed,
                since what is served is unknown.
            DeadlineError: the weights were not prepared, or the workers did not close their gate,
                in time. An engine that is late counts as failed.
        """
        deadline = Deadline(f"weight sync to {version}", self.timeout_s)
        await self._prepare(version, deadline)
        self._enter(SyncState.GATED, version)
        await within("rollout workers to close their gate", deadline.remaining_s, self.gate.close())
        results = await asyncio.gather(
            *(self._bring(name, client, version, canary, deadline)
              for name, client in clients.items())
        )  # fmt: skip
        gaps = {name: gap for name, gap, _ in results if gap is not None}
        failed = {name: why for name, _, why in results if why is not None}
        self._enter(SyncState.COMMIT, version)
        if len(gaps) < self.min_engines:
            raise EngineError(
                f"weight sync to {version}: {len(gaps)} engines serve it, {self.min_engines} are "
                f"needed: {'; '.join(f'{n}: {w}' for n, w in failed.items()) or 'no engine is up'}"
            )
        await self.transport.finish(version)
        return SyncOutcome(version, max(gaps.values()), tuple(sorted(gaps)), failed)

    async def push(
        self, name: str, client: EngineClient, version: str, canary: CanaryReading
    ) -> float:
        """Brings one restarted engine to the version that the others serve already.

        Raises:
            EngineError: it did not take the weights or fails the canary.
        """
        await self.transport.prepare(version)
        try:
            return await within(
                f"engine {name} to take {version}",
                self.timeout_s,
                self._load(name, client, version, canary),
            )
        finally:
            await self.transport.finish(version)
            self.state = SyncState.SERVING

    async def resume(self) -> None:
        """Opens the gate; call it after the commit has been recorded."""
        await self.gate.open()
        self.state = SyncState.SERVING

    async def _prepare(self, version: str, deadline: Deadline) -> None:
        """Readies the bytes. The engines serve on, also if this fails."""
        self._enter(SyncState.PREPARE, version)
        try:
            name = f"preparing weights {version}"
            await within(name, deadline.remaining_s, self.transport.prepare(version))
        except BaseException:
            self._enter(SyncState.SERVING, version)
            raise

    async def _bring(
        self,
        name: str,
        client: EngineClient,
        version: str,
        canary: CanaryReading,
        deadline: Deadline,
    ) -> tuple[str, float | None, str | None]:
        """One engine through QUIET, TRANSFER and VERIFY: (name, canary gap, why it failed)."""
        reasons: list[str] = []
        self._states[name] = SyncState.GATED
        for _ in range(TRANSFERS_PER_ENGINE):
            try:
                gap = await within(
                    f"engine {name} to take {version}",
                    deadline.remaining_s,
                    self._load(name, client, version, canary),
                )
                return name, gap, None
            except SlimeError as error:
                why = f"{self._states[name].value}: {error}"
                log.warning("engine %s did not take %s: %s", name, version, why)
                reasons.append(why)
        return name, None, "; then ".join(dict.fromkeys(reasons))

    async def _load(
        self, name: str, client: EngineClient, version: str, canary: CanaryReading
    ) -> float:
        self._enter(SyncState.QUIET, version, name)
        await client.pause("abort")
        await drain(name, client)
        self._enter(SyncState.TRANSFER, version, name)
        await self.transport.send(client, version)
        await drain(name, client)
        await client.resume()
        self._enter(SyncState.VERIFY, version, name)
        return await verify(client, version, canary, self.tolerance)

    def _enter(self, state: SyncState, version: str, engine: str = "") -> None:
        """Moves the sync, or one engine in it; engines go through their states side by side."""
        self.state = state
        if engine:
            self._states[engine] = state
        log.debug("sync %s: %s %s", version, state.value, engine)


async def drain(name: str, client: EngineClient) -> None:
    """Waits until an engine says itself that it holds no request; its cache is empty then.

    The answers of all requests do not say so: they leave before SGLang's scheduler has let go of
    its last batch. An update that asks for a flush in that moment ends SGLang, which is why a
    sync flushes by this call, before and after its update.

    Raises:
        DeadlineError: requests were still held after QUIET_TIMEOUT_S.
    """

    async def flushed() -> bool | None:
        return True if await client.flush_cache() else None

    await apoll(f"engine {name} to be quiet", QUIET_TIMEOUT_S, flushed, interval_s=0.02)


async def verify(
    client: EngineClient, version: str, canary: CanaryReading, tolerance: float
) -> float:
    """Checks that an engine serves `version` with the trainer's numbers.

    Returns:
        The largest log-prob difference on the canary.

    Raises:
        EngineError: another version is echoed, or the difference is above `tolerance`.
    """
    log_probs, served_version = await client.score_versioned(canary.tokens)
    if served_version != version:
        raise EngineError(f"{client.url} echoes weight version {served_version}, not {version}")
    gap = largest_gap(canary.log_probs, log_probs)
    if not gap <= tolerance:
        raise EngineError(
            f"{client.url} differs from the trainer by {gap:.3g} on the canary tokens under "
            f"{version} (allowed {tolerance:.3g}): its weights are not the trainer's"
        )
    return gap
