"""The rollout worker: draws, generation, scoring and parts of a run's segments."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slime_core.agents.gateway import Gateway
from slime_core.agents.turn_log import TurnLog, forget_turns, recorded_turns
from slime_core.data.custom_source import CustomSource
from slime_core.data.tokenizer import load_tokenizer
from slime_core.errors import DigestError, StaleOwnerError
from slime_core.plugins.args_view import ArgsView
from slime_core.refs import Ref
from slime_core.rewards.hub import RewardHub
from slime_core.rollout.bridge import what_changes
from slime_core.rollout.draw_log import DrawLog
from slime_core.rollout.evaluation import Evaluator
from slime_core.rollout.gate import EngineGate
from slime_core.rollout.generate import tokenize_prompt
from slime_core.rollout.group import GroupMaker
from slime_core.rollout.handed_out import HandedOut
from slime_core.rollout.log_hooks import LogHooks, asked
from slime_core.rollout.loop_watch import LoopWatch
from slime_core.rollout.outcome import Outcome
from slime_core.rollout.part_writer import PartTarget, PartWriter
from slime_core.rollout.returned import Choice, commit_choice, read_choice, selected
from slime_core.rollout.runtime import Runtime
from slime_core.rollout.scoring import Scorer
from slime_core.rollout.seen_source import SeenSource
from slime_core.rollout.segment import (
    FURTHER_DRAWS_PER_GROUP,
    FURTHER_DRAWS_WITH_FILTER,
    SegmentLoop,
    SegmentPlan,
    SegmentWork,
)
from slime_core.rollout.segment_bounds import begun, chosen_of, close_segment, drawn, kept_prefixes
from slime_core.rollout.settings import EvalJob, RolloutSettings
from slime_core.rollout.setup import (
    client_of,
    reward_settings,
    sampling_of,
    threads_of,
    vocab_size_of,
)
from slime_core.rollout.source_of_run import open_source, select_of
from slime_core.rollout.whole import WholeRollout, WholeSegment, evaluation_path, training_path
from slime_core.rollout.whole_evaluation import WholeEvaluation
from slime_core.run.follower import Follower
from slime_core.run.logs import log_to_file
from slime_core.sample import Sample
from slime_core.seeds import derive_seed
from slime_core.store import layout
from slime_core.store.backend import join_url, open_backend
from slime_core.store.cache import NodeCache
from slime_core.store.digest import checksum
from slime_core.store.draws import Draw
from slime_core.store.seal import Seal, Segment, adopt, put_seal, read_seal

log = logging.getLogger(__name__)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
                   "tokenizer.model", "special_tokens_map.json", "added_tokens.json")  # fmt: skip


class RolloutWorker:
    """Everything between a prompts file and a sealed segment, in one process.

    Args:
        settings: configuration, run and store.
    """

    def __init__(self, settings: RolloutSettings) -> None:
        config = settings.config
        self._settings = settings
        self._config = config
        self._backend = open_backend(
            join_url(settings.store_url, settings.run_id), fsync=config.store.store_fsync
        )
        self._cache = NodeCache(self._backend, settings.cache)
        connect = partial(client_of, config)
        self._gate = EngineGate(connect, config.rollout.sglang_server_concurrency)
        self._threads = threads_of(config)
        self._epoch = -1
        self._part_seq = itertools.count()
        self._recorded: dict[str, list[str]] = {}
        self._handed_out: HandedOut | None = None

    async def setup(self) -> dict[str, Any]:
        """Loads tokenizer, prompts and graders.

        Returns:
            tokenizer_digest, data_fingerprint and the row counts of the prompts.
        """
        log_to_file(self._settings.log_file, self._config.debug.log_level)
        self._watch = LoopWatch()
        self._tokenizer = await asyncio.to_thread(
            load_tokenizer, self._config.rollout.hf_checkpoint
        )
        self._tokenizer_digest = tokenizer_digest(self._config.rollout.hf_checkpoint)
        self._args = ArgsView(self._config)
        self._vocab_size = vocab_size_of(self._config.rollout.hf_checkpoint)
        source = await asyncio.to_thread(open_source, self._config, self._args, self._tokenizer)
        self._source = source
        self._select = select_of(self._config, self._args, source)
        if self._config.rollout.tool_paths and self._config.data.apply_chat_template:
            kwargs = self._config.data.apply_chat_template_kwargs
            what_changes(self._tokenizer, "tool", kwargs)  # raises now, not at the first call
        model = Path(self._config.rollout.hf_checkpoint).name
        self._gateway = Gateway(model, self._config.rollout.agent_concurrency)
        path = training_path(
            self._config.rollout.rollout_function_path, self._config.debug.load_debug_rollout_data
        )
        limit_s = self._config.fault_tolerance.stage_timeout_s
        self._whole = WholeRollout.load(path, limit_s) if path else None
        self._hub = RewardHub(reward_settings(self._config, self._tokenizer), self._args)
        self._maker = GroupMaker(
            self._args, Scorer(self._hub, self._config.rewards.reward_error_policy)
        )
        self._draws = DrawLog(self._backend, source, self._tokenize)
        self._told = LogHooks(asked(self._config), self._args)
        self._told.check()
        self._evaluator = Evaluator(
            self._config, self._backend, self._maker, self._runtime(lambda: False), self._told
        )
        await asyncio.to_thread(self._evaluator.open_all)
        path = evaluation_path(self._config.eval.eval_function_path, path)
        whole = WholeRollout.load(path, limit_s) if path else None
        self._whole_evaluation = WholeEvaluation(whole, self._evaluator) if whole else None
        return {
            "tokenizer_digest": self._tokenizer_digest,
            "data_fingerprint": source.fingerprint,
            "prompts": source.counts,
        }

    async def fence(self, epoch: int) -> None:
        """Takes the owner's number; draws logged by earlier owners are read anew."""
        self._check_epoch(epoch)
        self._epoch = epoch
        await asyncio.to_thread(self._draws.refresh)

    async def set_engines(self, urls: list[str]) -> None:
        await self._gate.set_engines(urls)

    async def open_gate(self) -> None:
        await self._gate.open()

    async def close_gate(self) -> None:
        await self._gate.close()

    async def engines_down(self) -> dict[str, str]:
        """Engines that failed a request since `set_engines`: url -> why."""
        return self._gate.down

    async def sample(self, epoch: int, segment: int) -> Ref:
        """Logs the segment's draws; those that are logged already count."""
        self._check_epoch(epoch)
        return await asyncio.to_thread(self._sample, epoch, segment)

    async def generate(self, epoch: int, segment: int) -> Ref:
        """Brings a segment to its target and seals it."""
        self._check_epoch(epoch)
        begun_s = time.monotonic()
        seal = await asyncio.to_thread(read_seal, self._backend, segment)
        if seal is not None:
            await asyncio.to_thread(self._dump, seal)
            await self._tell(seal, math.nan)  # whoever made it took the time
            return Ref(**{**seal.ref().to_dict(), "from_store": True})
        adopted = await asyncio.to_thread(adopt, self._cache, segment)
        masked = self._config.rollout.mask_offpolicy_in_partial_rollout
        draws, prefixes = await asyncio.to_thread(begun, self._cache, self._draws, segment, masked)
        self._recorded = await asyncio.to_thread(recorded_turns, self._backend, segment)
        plan = self._plan(segment)
        writer = PartWriter(
            PartTarget(self._backend, self._cache, segment, epoch, plan.target // 2),
            lambda: next(self._part_seq),
        )
        metrics: dict[str, float] = {}
        try:
            if self._whole is None:
                loop = SegmentLoop(plan, self._work(segment), writer)
                await loop.run(draws, adopted, prefixes)
            elif len(adopted.kept) < plan.target:
                metrics = await self._by_function(plan, writer, draws, adopted, prefixes)
        finally:
            await writer.close()
        seal = await asyncio.to_thread(self._seal, epoch, segment, metrics)
        await self._tell(seal, time.monotonic() - begun_s)
        if self._config.rollout.generate_path is not None:
            await asyncio.to_thread(forget_turns, self._backend, segment)
        return seal.ref()

    async def evaluate(self, epoch: int, job: EvalJob) -> Ref:
        """Answers and scores one evaluation dataset."""
        self._check_epoch(epoch)
        owner = Follower(self._backend, epoch)
        if self._whole_evaluation is not None:
            runtime = replace(self._runtime(lambda: False), evaluation=True)
            return await self._whole_evaluation.run(runtime, self._args, owner, job)
        return await self._evaluator.run(owner, job)

    async def _by_function(
        self,
        plan: SegmentPlan,
        writer: PartWriter,
        draws: list[Draw],
        adopted: Segment,
        prefixes: dict[int, Sequence[Sample]],
    ) -> dict[str, float]:
        """Lets a whole rollout function make the segment; returns its metrics."""
        assert self._whole is not None
        number, finished = plan.segment, adopted.finished
        source = HandedOut(
            [draw for draw in draws if draw.group_id not in finished],
            prefixes,
            adopted.next_attempts,
            lambda count: self._draws.draw(number, count),
            *self._inner_and_length(),
        )
        scorer = Scorer(self._hub, self._config.rewards.reward_error_policy)
        missing = plan.target - len(adopted.kept)
        args = copy.copy(self._args)
        vars(args)["rollout_batch_size"] = missing  # the other groups stand in the store
        segment = WholeSegment(
            self._whole, number, missing, source, scorer, writer,
            lambda groups: self._draws.claim(number, groups), self._handed_out,
        )  # fmt: skip
        self._handed_out = source
        try:
            return await segment.run(self._runtime(lambda: False), args)
        except BaseException:
            await self._gate.abort_all()
            raise

    def _sample(self, epoch: int, segment: int) -> Ref:
        before = read_seal(self._backend, segment - 1) if segment else None
        begun_again = self._chosen(epoch, segment, before).begun
        logged = self._draws.of_segment(segment)
        missing = self._begin() - len(begun_again) - len(logged)
        if self._whole is not None:
            missing = 0  # it says itself how many it needs
        if missing > 0:
            logged += self._draws.draw(segment, missing)
        rows = sum(len(draw.samples) for draw in logged)
        files = self._draws.files_of(segment)
        key = layout.draws(files[0]) if files else layout.seal(max(0, segment - 1))
        return Ref(key, "draws", segment, rows=rows, from_store=missing <= 0)

    def _chosen(self, epoch: int, segment: int, before: Seal | None) -> Choice:
        """Which of the groups that came back begin here: as it is stored, or chosen now."""
        known = read_choice(self._backend, segment, before)
        own = isinstance(self._source, CustomSource) and self._source.keeps_buffer
        if known is not None or before is None:
            return known or Choice()
        if self._select is None and not own:
            return Choice(before.returned)
        owner = Follower(self._backend, epoch)
        draws = {draw.group_id: draw for draw in self._draws.of_groups(before.returned)}
        prefixes = kept_prefixes(self._cache, segment, before.returned)
        groups = {g: list(prefixes.get(g) or draws[g].samples) for g, _ in before.returned}
        if self._select is not None:
            picked, dropped = selected(self._select, groups, self._begin())
            return commit_choice(self._backend, owner, segment, before, picked, dropped)
        assert isinstance(self._source, CustomSource)
        picked, fresh = self._source.offer(groups, self._begin())
        choice = commit_choice(self._backend, owner, segment, before, picked)
        self._draws.claim(segment, fresh)
        return choice

    def _seal(self, epoch: int, segment: int, metrics: dict[str, float]) -> Seal:
        draws = drawn(self._cache, self._draws, segment)
        found = adopt(self._cache, segment)
        plan = self._plan(segment)
        before = read_seal(self._backend, segment - 1) if segment else None
        waiting = chosen_of(self._cache, segment, before).waiting
        any_order = plan.partial or self._whole is not None
        closed = close_segment(found, draws, plan.target, first_come=any_order, waiting=waiting)
        if closed is None:
            raise DigestError(
                f"only {len(found.kept)} of {plan.target} kept groups of segment {segment} can be "
                f"read back, {len(found.quarantined)} parts were damaged and moved to quarantine: "
                "start again, then they are generated anew"
            )
        seal = put_seal(
            self._backend,
            Follower(self._backend, epoch),
            closed.segment,
            parent=before.digest if before else "",
            draws=(draws[0].group_id, draws[-1].group_id + 1),
            tokenizer_digest=self._tokenizer_digest,
            returned=closed.returned,
            metrics=metrics,
        )
        self._dump(seal)
        return seal

    async def _tell(self, seal: Seal, seconds: float) -> None:
        """Tells the user's functions of a segment, where there are any."""
        inner, length = self._inner_and_length()
        source = SeenSource(inner, length, len(seal.returned))
        await self._told.segment(self._cache, seal, seconds, source)

    def _inner_and_length(self) -> tuple[Any, int]:
        """The user's own source and the prompts in one pass, as far as there are such."""
        if isinstance(self._source, CustomSource):
            return self._source.inner, 0
        return None, len(self._source)

    def _dump(self, seal: Seal) -> None:
        """Writes the kept samples to a file of the user's, where that is asked for."""
        if template := self._config.debug.save_debug_rollout_data:
            from slime_core.rollout.dumps import dump_segment  # imports torch

            dump_segment(self._cache, seal, template)

    def _begin(self) -> int:
        """Groups that a segment begins with."""
        rollout = self._config.rollout
        return rollout.over_sampling_batch_size or rollout.rollout_batch_size

    def _plan(self, segment: int) -> SegmentPlan:
        rollout = self._config.rollout
        filtered = rollout.dynamic_sampling_filter_path is not None
        return SegmentPlan(
            segment,
            rollout.rollout_batch_size,
            self._config.fault_tolerance.max_group_attempts,
            wave=max(1, self._begin() - rollout.rollout_batch_size),
            further_per_group=FURTHER_DRAWS_WITH_FILTER if filtered else FURTHER_DRAWS_PER_GROUP,
            partial=rollout.partial_rollout,
        )

    def _work(self, segment: int) -> SegmentWork:
        async def finish(samples: list[Sample], stopping: Callable[[], bool]) -> Outcome:
            return await self._maker.finish(self._runtime(stopping, segment), samples, segment)

        return SegmentWork(
            finish, lambda count: self._draws.draw(segment, count), self._gate.abort_all
        )

    def _runtime(self, stopping: Callable[[], bool], segment: int | None = None) -> Runtime:
        """
        Args:
            segment: whose agents' turns are recorded; None in evaluations.
        """

        def turn_log(sample: Sample, ordinal: int) -> TurnLog:
            assert segment is not None and sample.group_index is not None
            name = layout.session(
                segment, sample.group_index, sample.attempt, sample.index or 0, ordinal
            )
            return TurnLog(self._backend, name, self._epoch, self._recorded.get(name, ()))

        return Runtime(
            args=self._args,
            tokenizer=self._tokenizer,
            gate=self._gate,
            hub=self._hub,
            sampling=sampling_of(self._config),
            seed_of=self._seed_of,
            stopping=stopping,
            home=asyncio.get_running_loop(),
            gateway=self._gateway,
            turn_log=None if segment is None else turn_log,
            vocab_size=self._vocab_size,
            threads=self._threads,
        )

    def _seed_of(self, sample: Sample) -> int:
        """By run seed, group, sample and attempt; a continuation has a seed of its own."""
        assert sample.group_index is not None and sample.index is not None
        return derive_seed(
            self._config.run.seed, self._config.rollout.rollout_seed, "sample",
            sample.group_index, sample.index, sample.attempt, sample.response_length,
        )  # fmt: skip

    def _tokenize(self, sample: Sample) -> None:
        chat = self._config.rollout.generate_path is not None
        tokenize_prompt(sample, self._tokenizer, chat=chat)

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise StaleOwnerError(f"epoch {epoch} is over; this worker follows {self._epoch}")


def tokenizer_digest(hf_checkpoint: str) -> str:
    """xxh3-128 (hex) over the tokenizer's files: what token ids mean."""
    folder = Path(hf_checkpoint)
    present = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return checksum(b"".join(name.encode() + (folder / name).read_bytes() for name in present))
