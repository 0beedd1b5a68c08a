"""What sync records, and which evaluations are due, done once and told from which weights."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slime_core.engines.client import EngineAnswerError
from slime_core.errors import EngineError, RewardError
from slime_core.refs import Ref
from slime_core.rollout.settings import EvalJob
from slime_core.run.context import RunContext
from slime_core.stages.evaluate import due_evaluation, evaluate
from slime_core.stages.sync import sync
from slime_core.stages.train import train
from slime_core.store import layout
from slime_core.store.documents import put_document, read_document
from tests.unit.stages.standins import Lab, packed

DATA = ["easy", "e.jsonl", "hard", "h.jsonl"]


def trained(tmp_path: Path, **overrides: Any) -> tuple[RunContext, Ref]:
    ctx = Lab(tmp_path, **overrides).start()

    async def body() -> Ref:
        await ctx.trainer.invoke("set_state", ctx.start_state)
        ctx.state.digest = ctx.start_state
        return await train(ctx, packed(ctx, 0))

    return ctx, asyncio.run(body())


def test_sync_records_the_version_and_opens_the_gate(tmp_path):
    ctx, ledger = trained(tmp_path)
    ref = asyncio.run(sync(ctx, ledger))
    document = read_document(ctx.backend, layout.sync(0))
    assert (ref.uri, ref.digest) == (layout.sync(0), document.digest)
    assert document.body == {"iteration": 0, "version": "l0-1"}
    assert document.by["engines"] == 1 and document.by["canary"] == 0.0
    assert set(document.by["seconds"]) == {"train", "save", "sync"}
    assert ctx.rollout.is_open and ctx.rollout.urls == ctx.engines.urls


def test_weights_that_are_served_already_are_not_sent_again(tmp_path):
    ctx, ledger = trained(tmp_path)
    asyncio.run(sync(ctx, ledger))
    again = asyncio.run(sync(ctx, ledger))
    assert again.from_store
    assert ctx.weight_sync.transport.prepared == ["l0-1"]  # type: ignore[attr-defined]


def test_evaluations_are_due_before_at_each_interval_and_at_the_end(tmp_path):
    ctx = Lab(tmp_path, num_rollout=5, eval_interval=2, eval_prompt_data=DATA).start()
    assert [k for k in range(-1, 5) if due_evaluation(ctx, k)] == [-1, 1, 3, 4]
    late = Lab(
        tmp_path, num_rollout=5, eval_interval=2, eval_prompt_data=DATA,
        skip_eval_before_train=True,
    ).start()  # fmt: skip
    assert not due_evaluation(late, -1)
    assert not any(due_evaluation(Lab(tmp_path).start(), k) for k in range(-1, 5))


@pytest.fixture
def evaluating(tmp_path: Path) -> tuple[RunContext, list[EvalJob]]:
    ctx = Lab(tmp_path, eval_interval=1, eval_prompt_data=DATA).start()
    jobs: list[EvalJob] = []

    async def run(epoch: int, job: EvalJob) -> Ref:
        assert epoch == ctx.lease.epoch
        jobs.append(job)
        key = layout.evaluation(job.version, job.dataset)
        put_document(ctx.backend, key, {"dataset": job.dataset})
        return Ref(key, "eval", job.iteration, rows=3)

    ctx.rollout.stages["evaluate"] = run  # type: ignore[attr-defined]
    return ctx, jobs


def test_each_dataset_is_evaluated_once_a_version(evaluating):
    ctx, jobs = evaluating
    ref = asyncio.run(evaluate(ctx, -1, 0))
    assert jobs == [EvalJob(0, "l0-0", "easy"), EvalJob(0, "l0-0", "hard")]
    assert ref is not None and ref.uri == "evals/l0-0/hard.json" and not ref.from_store
    again = asyncio.run(evaluate(ctx, -1, 0))
    assert len(jobs) == 2 and again is not None and again.from_store


def test_only_what_a_killed_process_left_out_is_evaluated(evaluating):
    ctx, jobs = evaluating
    put_document(ctx.backend, layout.evaluation("l0-1", "easy"), {"dataset": "easy"})
    asyncio.run(evaluate(ctx, 0, 1))
    assert jobs == [EvalJob(1, "l0-1", "hard")]


def test_rows_without_their_scores_do_not_count_as_evaluated(evaluating):
    """Killed between the two objects."""
    ctx, jobs = evaluating
    ctx.backend.put_new(layout.evaluation("l0-1", "easy", "arrow"), b"rows")
    asyncio.run(evaluate(ctx, 0, 1))
    assert [job.dataset for job in jobs] == ["easy", "hard"]


@pytest.mark.parametrize(
    "error", [RewardError("no prompt could be graded"), EngineAnswerError("e", 400, "too long")]
)
def test_what_cannot_be_evaluated_is_recorded_as_missed_and_ends_nothing(evaluating, error):
    ctx, jobs = evaluating
    plain = ctx.rollout.stages["evaluate"]

    async def fails(epoch: int, job: EvalJob) -> Ref:
        if job.dataset == "easy":
            raise error
        return await plain(epoch, job)

    ctx.rollout.stages["evaluate"] = fails
    asyncio.run(evaluate(ctx, 0, 1))
    assert [job.dataset for job in jobs] == ["hard"]
    body = read_document(ctx.backend, "evals/l0-1/easy.json").body
    assert (body["metrics"], body["missed"]) == ({}, str(error))
    asyncio.run(evaluate(ctx, 0, 1))
    assert len(jobs) == 1, "it is owed no more"


def test_engines_that_fail_do_end_the_stage(evaluating):
    ctx, _ = evaluating

    async def fails(epoch: int, job: EvalJob) -> Ref:
        raise EngineError("no engine is left")

    ctx.rollout.stages["evaluate"] = fails
    with pytest.raises(EngineError):
        asyncio.run(evaluate(ctx, 0, 1))
    assert ctx.backend.list("evals/") == []


def test_without_datasets_there_is_nothing_to_do(tmp_path):
    assert asyncio.run(evaluate(Lab(tmp_path).start(), 0, 1)) is None
