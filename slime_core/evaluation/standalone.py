"""An evaluation without a run's processes: weights of a run, or a model, in engines of its own."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slime_core.agents.gateway import Gateway
from slime_core.cluster.device import resolve_device
from slime_core.cluster.engine_choice import engine_options, resolve_engine
from slime_core.cluster.engine_pool import EnginePool, PoolLimits
from slime_core.cluster.ports import HeldPort
from slime_core.cluster.trainer_settings import model_facts, training_dtype
from slime_core.config.tree import RunConfig
from slime_core.data.tokenizer import load_tokenizer
from slime_core.engines.client import EngineClient
from slime_core.engines.launcher import EngineProcess, engine_process, free_port
from slime_core.errors import ConfigError, EngineError
from slime_core.evaluation.resolve import eval_datasets
from slime_core.evaluation.target import Target
from slime_core.plugins.args_view import ArgsView
from slime_core.refs import Ref
from slime_core.rewards.hub import RewardHub
from slime_core.rollout.evaluation import Evaluator
from slime_core.rollout.gate import EngineGate
from slime_core.rollout.group import GroupMaker
from slime_core.rollout.runtime import Runtime
from slime_core.rollout.scoring import Scorer
from slime_core.rollout.settings import EvalJob
from slime_core.rollout.setup import client_of, reward_settings, sampling_of, threads_of
from slime_core.rollout.whole import WholeRollout, evaluation_path, training_path
from slime_core.rollout.whole_evaluation import WholeEvaluation
from slime_core.run.identity import ONE_RANK, recorded_config
from slime_core.run.replay import Rank, Replay
from slime_core.store import layout
from slime_core.store.documents import Document, read_document
from slime_core.store.ledger import Ledger

log = logging.getLogger(__name__)
LOOK_S = 0.5
T = TypeVar("T")
Answer = Callable[[EvalJob], Coroutine[Any, Any, Ref]]


@dataclass(frozen=True)
class Result:
    """One dataset's result.

    Attributes:
        key: of its document in the store; its samples stand beside it.
        found: it was there already.
    """

    dataset: str
    key: str
    metrics: dict[str, float]
    found: bool


class StandaloneEvaluation:
    """Evaluates a target. Enter it, then `weights` and `engines` where something is missing, then
    `run` for each dataset; use one event loop, in the main thread.

    Args:
        build_rank: makes a trainer in this process, to write a run's weights out.
    """

    def __init__(self, target: Target, build_rank: Callable[[RunConfig], Rank]) -> None:
        self.target = target
        self.datasets = [dataset.name for dataset in eval_datasets(target.config)]
        self._build_rank = build_rank
        self._later = AsyncExitStack()
        self._model = target.model
        self._pool: EnginePool | None = None

    async def __aenter__(self) -> StandaloneEvaluation:
        """Loads tokenizer, prompts and graders.

        Raises:
            SlimeError: something of it cannot be used.
        """
        config = self.target.config
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, config.rollout.hf_checkpoint)
            args = ArgsView(config)
            hub = RewardHub(reward_settings(config, tokenizer), args)
            self._later.push_async_callback(hub.close)
            connect = partial(client_of, config)
            self._gate = EngineGate(connect, config.rollout.sglang_server_concurrency)
            self._later.push_async_callback(self._gate.aclose)
            maker = GroupMaker(args, Scorer(hub, config.rewards.reward_error_policy))
            sampling = sampling_of(config)
            runtime = Runtime(args, tokenizer, self._gate, hub, sampling, lambda sample: 0)
            runtime.home = asyncio.get_running_loop()
            runtime.threads = threads_of(config)
            model = Path(config.rollout.hf_checkpoint).name
            runtime.gateway = Gateway(model, config.rollout.agent_concurrency)
            self._later.push_async_callback(runtime.gateway.close)
            self._evaluator = Evaluator(config, self.target.backend, maker, runtime)
            await asyncio.to_thread(self._evaluator.open_all)
            self._answer = self._answering(runtime, args)
        except BaseException:
            await self._later.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._later.aclose()

    def stored(self, dataset: str) -> Result | None:
        """The result that the store has of a dataset.

        Raises:
            ConfigError: it has one of this name that was made with other settings.
        """
        key = layout.evaluation(self.target.version, dataset)
        document = self._document(key)
        if document is None:
            return None
        if "missed" in document.body:
            raise ConfigError(
                f"{key} of {self.target.owner} says that this evaluation was missed: "
                f"{document.body['missed']}; give the dataset another name to evaluate it now"
            )
        if document.body.get("settings") != self._evaluator.settings_digest(dataset):
            raise ConfigError(
                f"{self.target.owner} has a result named {dataset} for {self.target.version} "
                "already, made with other settings, prompts or seed: results are never changed, "
                "so give the dataset another name"
            )
        return Result(dataset, key, document.body["metrics"], True)

    async def weights(self) -> None:
        """Writes a run's weights into a folder that engines can load; a model has its own.

        Raises:
            DigestError: what they need is gone or damaged.
        """
        if self._model is not None:
            return
        paths = self.target.paths
        paths.local.mkdir(parents=True, exist_ok=True)
        scratch = self._later.enter_context(
            tempfile.TemporaryDirectory(prefix="evaluate-", dir=paths.local)
        )
        folder = Path(scratch) / "model"
        await asyncio.to_thread(self._export, folder, Path(scratch))
        self._model = folder

    async def engines(self) -> None:
        """Starts the engines on the weights and waits for them.

        Raises:
            EngineError: one ended at its start; the end of its log is quoted.
        """
        assert self._model is not None
        pool = self._made_pool(self._model)
        self._later.push_async_callback(pool.close)
        pool.start()
        await pool.ready()
        self._pool = pool
        await self._gate.set_engines(pool.urls)
        await self._gate.open()

    async def run(self, dataset: str) -> Result:
        """Answers and grades a dataset's prompts and stores the result.

        Raises:
            EngineError: the engines ended, or an answer came from other weights.
            RewardError: no prompt could be graded.
        """
        job = EvalJob(self.target.iterations, self.target.version, dataset)
        ref = await self._while_alive(self._answer(job))
        document = read_document(self.target.backend, ref.uri)
        return Result(dataset, ref.uri, document.body["metrics"], ref.from_store)

    def _answering(self, runtime: Runtime, args: ArgsView) -> Answer:
        """Our own evaluation, or the whole function that the configuration names."""
        config = self.target.config
        training = training_path(config.rollout.rollout_function_path)
        path = evaluation_path(config.eval.eval_function_path, training)
        if path is None:
            return partial(self._evaluator.run, None)
        function = WholeRollout.load(path, config.fault_tolerance.stage_timeout_s)
        whole = WholeEvaluation(function, self._evaluator)
        return partial(whole.run, replace(runtime, evaluation=True), args, None)

    def _document(self, key: str) -> Document | None:
        present = {entry.key for entry in self.target.backend.list(key)}
        return read_document(self.target.backend, key) if key in present else None

    def _export(self, folder: Path, scratch: Path) -> None:
        cache = self.target.cache

        def recorded(ledger: Ledger) -> RunConfig:
            device = {"device": self.target.config.cluster.device}
            return recorded_config(cache.backend, ledger.numeric_digest, ONE_RANK | device)

        replay = Replay(cache, self._build_rank, recorded, scratch)
        replay.export(self.target.iterations, folder)

    def _made_pool(self, model: Path) -> EnginePool:
        config = self.target.config
        device = resolve_device(config)
        kind = resolve_engine(config, device)
        dtype = training_dtype(config, model_facts(str(model))["dtype"])
        options = engine_options(config, kind, device, dtype)
        options["weight_version"] = self.target.version
        logs = self.target.paths.logs
        logs.mkdir(parents=True, exist_ok=True)

        def spawn(index: int) -> tuple[EngineProcess, EngineClient]:
            process = engine_process(
                kind,
                str(model),
                self._port(kind),
                logs / f"evaluate-engine-{index}.log",
                options,
                threads=config.cluster.threads_per_process,
            )
            return process, EngineClient(process.url)

        size = config.cluster.rollout_num_gpus // config.cluster.rollout_num_gpus_per_engine
        return EnginePool(spawn, size, PoolLimits(config.fault_tolerance.start_timeout_s, 0))

    def _port(self, kind: str) -> int:
        """Held for the embedded engine, as a run does it."""
        if kind != "embedded":
            return free_port()
        held = HeldPort()
        self._later.callback(held.release)
        return held.number

    async def _while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits work; it ends with the last engine."""
        assert self._pool is not None
        task = asyncio.create_task(work)
        try:
            while not (await asyncio.wait({task}, timeout=LOOK_S))[0]:
                if not any(engine.process.alive for engine in self._pool.engines):
                    last = self._pool.engines[-1].process
                    raise EngineError(
                        f"every engine has ended (status {last.returncode}); the end of "
                        f"{last.log_path}:\n{last.log_tail()}"
                    )
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
