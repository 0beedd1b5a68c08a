"""Ten kinds of functions written for slime, unmodified, through the real worker and its stages."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slime_core.rollout.settings import EvalJob
from slime_core.stages.batch_hooks import processed_rewards, removed_rows
from slime_core.store.documents import read_document
from tests.integration.rollout.places import Place

PLUGINS = Path(__file__).parents[2] / "plugins_for_slime"


def at(path: str) -> str:
    return str(PLUGINS / path)


def segments(place: Place, count: int = 1) -> list[Any]:
    async def body() -> list[Any]:
        return [await place.segment(await place.ready(k), k, epoch=k) for k in range(count)]

    return asyncio.run(body())


def kept_rows(place: Place, seal: Any) -> list[list[Any]]:
    return [rows for (_, verdict), rows in place.rows(seal).items() if verdict == "kept"]


def test_a_segment_with_all_of_them_at_once(tmp_path, url):
    place = Place(
        tmp_path, url, custom_rm_path=at("rewards.py:reward_func"), rm_type=None,
        custom_generate_function_path=at("multi_turn.py"),
        dynamic_sampling_filter_path=at("filters.py:check_something_to_learn"),
        rollout_sample_hook_path=[at("filters.py:note_length")],
        data_source_path=at("source.py:EasyFirst"), over_sampling_batch_size=12,
        buffer_filter_path=at("filters.py:pop_newest"), rollout_max_response_len=24,
    )  # fmt: skip
    first, second = segments(place, 2)
    for seal in (first, second):
        groups = kept_rows(place, seal)
        assert len(groups) == 4
        for group in groups:
            assert len({sample.reward for sample in group}) > 1
            assert all(s.metadata["noted_length"] == len(s.response) for s in group)
            assert all(len(s.rollout_log_probs) == s.response_length for s in group)
    reasons = {g.entry.reason for g in first.groups if g.entry.verdict == "dropped"}
    assert all(r.startswith("dynamic_filter/zero_std_") for r in reasons)


def test_a_batched_reward_and_what_sees_a_whole_batch(tmp_path, url):
    place = Place(
        tmp_path, url, custom_rm_path=at("rewards.py:batched_custom_rm"), group_rm=True,
        rm_type=None,
    )  # fmt: skip
    (seal,) = segments(place)
    groups = kept_rows(place, seal)
    assert all(max(s.reward for s in group) == 1.0 for group in groups)
    args = place.worker()._config.rollout
    flat = [sample for group in groups for sample in group]
    view = type("Args", (), {"n_samples_per_prompt": args.n_samples_per_prompt})()
    raw, rewards = processed_rewards(at("rewards.py:reward_post_process"), view, flat)
    assert raw.tolist() == [s.reward for s in flat]
    assert rewards.reshape(4, 4).sum(axis=1) == pytest.approx([0.0] * 4)
    removed = removed_rows(at("filters.py:remove_truncated"), view, groups)
    assert list(removed) == [i for i, s in enumerate(flat) if s.status.value == "truncated"]


def test_a_source_that_makes_its_prompts(tmp_path, url):
    place = Place(tmp_path, url, data_source_path=at("source.py:Arithmetic"), prompt_data=None)
    first, second = segments(place, 2)
    prompts = {s.group_index: s.prompt for seal in (first, second)
               for rows in place.rows(seal).values() for s in rows}  # fmt: skip
    assert prompts == {n: f"{n % 7}1{n % 5}3=" for n in range(8)}


def test_a_whole_rollout_function_with_a_filter(tmp_path, url):
    place = Place(
        tmp_path, url, rollout_function_path=at("rollout.py:generate_rollout"),
        dynamic_sampling_filter_path=at("filters.py:check_something_to_learn"),
        over_sampling_batch_size=6,
    )  # fmt: skip
    first, second = segments(place, 2)
    assert len(kept_rows(place, first)) == len(kept_rows(place, second)) == 4
    dropped = [g.entry.reason for g in first.groups if g.entry.verdict == "dropped"]
    filtered = [reason for reason in dropped if reason.startswith("dynamic_filter/zero_std_")]
    assert first.metrics["rollout/dropped"] == len(filtered) > 0
    stored = [rows for (_, verdict), rows in place.rows(first).items() if verdict == "dropped"]
    assert sum(all(s.response and s.reward is not None for s in rows) for rows in stored) >= len(
        filtered)  # fmt: skip
    again = {g for g, _ in first.returned}
    assert again <= {g.entry.group_id for g in second.groups} | {g for g, _ in second.returned}


def test_an_evaluation_function(tmp_path, url):
    data = {"datasets": [{"name": "greedy", "path": "configs/quickstart/heldout.jsonl"}]}
    place = Place(tmp_path, url, eval_function_path=at("rollout.py:fixed_eval"),
                  eval_config=data, eval_interval=1)  # fmt: skip

    async def body() -> None:
        worker = await place.ready()
        await worker.evaluate(0, EvalJob(7, "l0-1", "greedy"))

    asyncio.run(body())
    metrics = read_document(place.backend, "evals/l0-1/greedy.json").body["metrics"]
    assert metrics["reward"] == 0.5 and metrics["asked"] == 7.0
