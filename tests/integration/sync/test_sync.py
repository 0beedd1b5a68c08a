"""Weight sync on real engines: the trainer's own numbers, and engines killed in each state."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_core.cluster.engine_pool import EnginePool
from slime_core.engines.client import EngineClient
from slime_core.engines.protocol import GenerateRequest
from slime_core.errors import EngineError, PluginError
from slime_core.waits import poll
from slime_core.weights.sync.canary import TOLERANCE_FP32
from slime_core.weights.sync.machine import SyncState, WeightSync
from slime_core.weights.sync.post_write import PostWrite
from slime_core.weights.sync.transports.disk import DiskTransport
from slime_core.weights.sync.transports.tensor import TensorTransport
from tests.integration.sync.conftest import MODEL, Trainer

NEW = "l0-2"


class Gate:
    """Remembers whether it is open."""

    def __init__(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    async def open(self) -> None:
        self.is_open = True


async def shipped(folder: str, version: str) -> None:
    """An export without a trainer: the weights that the trainer would hold."""
    if not Path(folder).exists():
        shutil.copytree(MODEL, folder)


def sync_of(transport: Any, timeout_s: float = 60.0) -> WeightSync:
    return WeightSync(Gate(), transport, timeout_s, TOLERANCE_FP32)


async def weight_versions(pool: EnginePool) -> dict[str, str]:
    return {name: await client.weight_version() for name, client in pool.clients().items()}


@pytest.mark.parametrize("kind", ["disk", "tensor in one bucket", "tensor in many buckets"])
def test_engines_serve_the_trainers_numbers(play, pool, trainer: Trainer, tmp_path, kind):
    (tmp_path / "weights").mkdir()
    bucket_bytes = 2**20 * 64 if kind == "tensor in one bucket" else 2**16
    transport: Any = (
        DiskTransport(tmp_path / "weights", trainer.export)
        if kind == "disk"
        else TensorTransport(trainer.buckets, trainer.release, bucket_bytes)
    )

    async def scenario() -> None:
        await other_weights(pool)
        reading = trainer.reading()
        before = await pool.engines[0].client.score(reading.tokens)
        gaps = [abs(a - b) for a, b in zip(before, reading.log_probs, strict=True)]
        assert max(gaps) > 0.01, "the engines must begin with other weights"
        for version in (NEW, "l0-3"):  # a second sync of the same run, too
            outcome = await sync_of(transport).run(version, reading, pool.clients())
            assert outcome.serving == ("engine-0", "engine-1") and not outcome.quarantined
            assert 0 <= outcome.canary < TOLERANCE_FP32
            assert set((await weight_versions(pool)).values()) == {version}
        for client in pool.clients().values():  # nothing is left paused
            result = await client.generate(GenerateRequest([26, 23], {"max_new_tokens": 2}))
            assert result.weight_version == "l0-3"
        if kind == "disk":
            assert [folder.name for folder in (tmp_path / "weights").iterdir()] == ["l0-3"]

    play(scenario)


async def other_weights(pool: EnginePool) -> None:
    """Back to the weights that the engines were started with."""
    for engine in pool.engines:
        path = (await engine.client.model_info())["model_path"]
        await engine.client.update_weights_from_disk(path, "l0-1")


class KillingTransport(DiskTransport):
    """Kills an engine while weights are prepared, or just before they are sent to it."""

    def __init__(self, folder: Path, at: SyncState, kill: Callable[[], None], url: str) -> None:
        super().__init__(folder, shipped)  # type: ignore[arg-type]
        self.at, self.kill, self.url = at, kill, url

    async def prepare(self, version: str) -> None:
        if self.at is SyncState.PREPARE:
            self.kill()
        await super().prepare(version)

    async def send(self, client: EngineClient, version: str) -> None:
        if self.at is SyncState.TRANSFER and client.url == self.url:
            self.kill()
        await super().send(client, version)


@pytest.mark.parametrize(
    ("at", "named"),
    [
        pytest.param(SyncState.PREPARE, "quiet", marks=pytest.mark.slow),
        pytest.param(SyncState.QUIET, "quiet", marks=pytest.mark.slow),
        (SyncState.TRANSFER, "transfer"),
        pytest.param(SyncState.VERIFY, "verify", marks=pytest.mark.slow),
    ],
)
def test_a_killed_engine_is_quarantined_and_the_other_serves(
    play, pool, trainer: Trainer, tmp_path, monkeypatch, at, named
):
    async def scenario() -> None:
        victim = pool.engines[1]
        pid = victim.process.pid or 0

        def shoot() -> None:
            if victim.process.pid == pid:  # not the one that is started in its place
                os.kill(pid, signal.SIGKILL)

        def shooting(method: Any) -> Any:
            async def call(*args: Any) -> Any:
                shoot()
                return await method(*args)

            return call

        if at is SyncState.QUIET:
            monkeypatch.setattr(victim.client, "pause", shooting(victim.client.pause))
        if at is SyncState.VERIFY:
            score = victim.client.score_versioned
            monkeypatch.setattr(victim.client, "score_versioned", shooting(score))
        (tmp_path / "weights").mkdir()
        transport = KillingTransport(tmp_path / "weights", at, shoot, victim.client.url)
        sync = sync_of(transport)
        reading, clients = trainer.reading(), pool.clients()
        assert len(clients) == 2, [one.process.log_tail() for one in pool.engines]
        outcome = await sync.run(NEW, reading, clients)
        assert outcome.serving == ("engine-0",) and outcome.canary < TOLERANCE_FP32
        why = outcome.quarantined["engine-1"]
        assert why.startswith(f"{named}: ") and "cannot be reached" in why
        poll("the killed engine to end", 10, lambda: None if victim.process.alive else True)
        await sync.resume()
        assert sync.gate.is_open and sync.state is SyncState.SERVING  # type: ignore[attr-defined]
        await pool.restart(victim)
        gap = await sync.push(victim.name, victim.client, NEW, trainer.reading())
        assert gap < TOLERANCE_FP32
        assert set((await weight_versions(pool)).values()) == {NEW}

    play(scenario)


def test_wrong_weights_are_caught_and_the_gate_stays_closed(play, pool, trainer, tmp_path):
    """The engine says the right version, but its numbers are not the trainer's."""
    (tmp_path / "weights").mkdir()

    async def wrong(folder: str, version: str) -> None:
        shutil.copytree((await pool.engines[0].client.model_info())["model_path"], folder)

    async def scenario() -> None:
        sync = sync_of(DiskTransport(tmp_path / "weights", wrong))  # type: ignore[arg-type]
        with pytest.raises(EngineError) as error:
            await sync.run(NEW, trainer.reading(), pool.clients())
        message = str(error.value)
        assert "weight sync to l0-2: 0 engines serve it, 1 are needed" in message
        assert message.count("its weights are not the trainer's") == 2
        assert not sync.gate.is_open  # type: ignore[attr-defined]

    play(scenario)


PUBLISH = """
import pathlib, shutil
def publish(args, version_dir, rollout_engines):
    name = pathlib.Path(version_dir).name
    if name == args.refused:
        raise OSError("the volume is full")
    shutil.copytree(version_dir, pathlib.Path(args.volume) / name)
    (pathlib.Path(args.volume) / "told").write_text(" ".join(e.url for e in rollout_engines))
"""


def test_a_function_is_told_of_the_folder_before_engines_load_it(
    play, pool, trainer: Trainer, tmp_path
):
    """Where it fails the engines serve on as before."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "volume").mkdir()
    (tmp_path / "own.py").write_text(PUBLISH)
    args = SimpleNamespace(volume=str(tmp_path / "volume"), refused="l0-3")
    urls = {name: client.url for name, client in pool.clients().items()}
    path = f"{tmp_path / 'own.py'}:publish"
    written = PostWrite(path, args, lambda: urls, 60.0)

    class Sees(DiskTransport):
        async def send(self, client: EngineClient, version: str) -> None:
            copy = tmp_path / "volume" / version / "model.safetensors"
            ours = tmp_path / "weights" / version / "model.safetensors"
            assert copy.read_bytes() == ours.read_bytes()
            await super().send(client, version)

    async def scenario() -> None:
        await other_weights(pool)
        sync = sync_of(Sees(tmp_path / "weights", trainer.export, written))
        outcome = await sync.run(NEW, trainer.reading(), pool.clients())
        assert outcome.serving == ("engine-0", "engine-1")
        assert (tmp_path / "volume" / "told").read_text() == " ".join(urls.values())
        await sync.resume()
        with pytest.raises(PluginError, match="publish raised OSError: the volume is full"):
            await sync.run("l0-3", trainer.reading(), pool.clients())
        assert sync.gate.is_open  # type: ignore[attr-defined]
        assert set((await weight_versions(pool)).values()) == {NEW}

    play(scenario)


def test_weights_that_do_not_fit_are_refused_by_name(play, pool, trainer, tmp_path):
    (tmp_path / "weights").mkdir()

    async def incomplete(folder: str, version: str) -> None:
        Path(folder).mkdir(parents=True)

    async def scenario() -> None:
        sync = sync_of(DiskTransport(tmp_path / "weights", incomplete))  # type: ignore[arg-type]
        with pytest.raises(
            EngineError, match=r"engine-0: transfer: .* has neither model\.safetens"
        ):
            await sync.run(NEW, trainer.reading(), pool.clients())

    play(scenario)
