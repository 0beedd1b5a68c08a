"""Plug-ins written for slime, through the real worker and a real engine, unmodified."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slime_core.sample import Sample, Status
from slime_core.store.seal import Seal
from tests.integration.rollout.places import Place

SEED = '''
"""Multi-turn generation with tools, in the list form."""
from slime_core.rollout.multiturn import (
    build_loss_mask, compute_reward, execute_tool, generate_single,
)

def extract_tool_call(text):
    """Whatever the model says first is taken for a sum to work out."""
    return None if text.startswith("!") else {
        "name": "calculator", "arguments": {"expression": "1+1"}}

async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        conversation = sample.prompt
        if not isinstance(conversation, list):
            conversation = [{"role": "user", "content": sample.prompt}]
        for turn in range(args.max_turns):
            response = await generate_single(args, conversation)
            call = extract_tool_call(response)
            if call and turn < args.max_turns - 1:
                result = await execute_tool(call)
                conversation.append({"role": "assistant", "content": response})
                conversation.append({"role": "tool", "content": result})
            else:
                sample.response = response
                break
        sample.reward = compute_reward(sample)
        sample.loss_mask = build_loss_mask(sample)
    return samples
'''

BATCHED = """
async def batched_custom_rm(args, samples):
    assert len(samples) == args.n_samples_per_prompt
    best = max(len(sample.response) for sample in samples)
    return [float(len(sample.response) == best) for sample in samples]
"""

UPSTREAM = '''
"""A loop of turns as upstream's examples have it: text out, token ids back, own mask."""
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    ids, masks, log_probs, text = [], [], [], ""
    for turn in range(2):
        payload = {"input_ids": prompt_ids + ids, "sampling_params": sampling_params,
                   "return_logprob": True}
        output = await post(url, payload)
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        new = [item[1] for item in meta["output_token_logprobs"]]
        ids += new
        log_probs += [item[0] for item in meta["output_token_logprobs"]]
        masks += [1] * len(new)
        text += output["text"]
        if turn == 0:
            seen = state.tokenizer(" ok ", add_special_tokens=False)["input_ids"]
            ids, masks = ids + seen, masks + [0] * len(seen)
            log_probs += [0.0] * len(seen)
    sample.tokens = prompt_ids + ids
    sample.response_length = len(ids)
    sample.response = text
    sample.loss_mask = masks
    sample.rollout_log_probs = log_probs
    sample.status = Sample.Status.COMPLETED
    return sample

async def reward_func(args, sample, **kwargs):
    return {"acc": float(bool(sample.label)), "length": sample.response_length}
'''

FAN_OUT = """
import copy
from slime.rollout.sglang_rollout import generate as plain

async def generate(args, sample, sampling_params, evaluation=False):
    sample = await plain(args, sample, sampling_params)
    other = copy.deepcopy(sample)
    other.reward, sample.reward = 0.25, 0.75
    return [sample, other]
"""

AWKWARD = """
from slime.rollout.sglang_rollout import generate as plain
from slime.utils.types import Sample

async def generate(args, sample, sampling_params):
    if sample.group_index == 1:
        raise RuntimeError("this prompt breaks me")
    if sample.group_index == 2:
        sample.metadata["handle"] = object()
        sample.loss_mask = [1] * 1000
    sample = await plain(args, sample, sampling_params)
    if sample.group_index == 3 and sample.index % 4 == 0:
        sample.status = Sample.Status.FAILED
    return sample

def hook(args, sample, *, rollout_id, evaluation):
    sample.metadata["seen_in"] = [rollout_id, evaluation]
"""

DIGITS = list(range(21, 31))  # their token ids: each turn ends at the first digit


def played(folder: Path, url: str, source: str, **overrides: Any) -> tuple[Place, Seal]:
    """One segment with a plug-in's file in the settings as PLUGIN."""
    (folder / "plugin.py").write_text(source)

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(item) for item in value]
        path = str(folder / "plugin.py")
        return value.replace("PLUGIN", path) if isinstance(value, str) else value

    place = Place(folder, url, **{name: filled(value) for name, value in overrides.items()})

    async def body() -> Seal:
        return await place.segment(await place.ready(), 0)

    return place, asyncio.run(body())


def kept(place: Place, seal: Seal) -> list[Sample]:
    rows = place.rows(seal)
    return [sample for key in sorted(rows) if key[1] == "kept" for sample in rows[key]]


def test_the_seeds_multi_turn_function_runs_as_it_is(tmp_path, url):
    place, seal = played(
        tmp_path, url, SEED, custom_generate_function_path="PLUGIN", max_turns=3,
        tool_paths=["calculator"], rollout_max_response_len=120,
        rollout_stop_token_ids=DIGITS,
    )  # fmt: skip
    samples = kept(place, seal)
    assert len(samples) == 16
    assert sum(sample.status is Status.COMPLETED for sample in samples) > 8
    for sample in samples:
        rounds = sample.metadata["round_number"]
        assert rounds == 3 if sample.status is Status.COMPLETED else sample.response_length == 120
        tool = [span for span in sample.spans if not span.trainable]
        assert len(tool) >= rounds - 1 and all(span.weight_version == "" for span in tool)
        assert [span.weight_version for span in sample.spans if span.trainable] == ["l0-1"] * rounds
        assert sum(sample.loss_mask) == sample.response_length - sum(s.length for s in tool)
        spoken = zip(sample.rollout_log_probs, sample.loss_mask, strict=True)
        assert all((value < 0) == bool(mask) for value, mask in spoken)
        assert sample.reward in (0.0, 1.0)
    assert len({tuple(s.tokens) for s in samples[:4]}) > 1, "each sample has its own seed"


def test_a_batched_reward_file_runs_as_it_is(tmp_path, url):
    place, seal = played(
        tmp_path, url, BATCHED, custom_rm_path="PLUGIN", group_rm=True, rm_type=None
    )
    rows = place.rows(seal)
    for samples in rows.values():
        longest = max(len(sample.response) for sample in samples)
        assert [s.reward for s in samples] == [float(len(s.response) == longest) for s in samples]


def test_upstreams_form_finds_slimes_names_and_keeps_token_ids(tmp_path, url):
    place, seal = played(
        tmp_path, url, UPSTREAM, custom_generate_function_path="PLUGIN:generate",
        custom_rm_path="PLUGIN:reward_func", reward_key="acc", rollout_max_response_len=40,
    )  # fmt: skip
    for sample in kept(place, seal):
        assert sample.reward == {"acc": 1.0, "length": sample.response_length}
        assert sample.loss_mask.count(0) == 4 and sample.weight_versions == ["l0-1"]
        assert len(sample.tokens) == 5 + sample.response_length


def test_fanned_out_rows_are_one_rollout(tmp_path, url):
    place, seal = played(tmp_path, url, FAN_OUT, custom_generate_function_path="PLUGIN")
    assert (seal.rollouts, seal.rows) == (16, 32)
    samples = kept(place, seal)
    assert [sample.reward for sample in samples[:4]] == [0.75, 0.25, 0.75, 0.25]
    assert [sample.rollout_id for sample in samples[:4]] == [0, 0, 1, 1]
    assert None not in place.graders(seal), "what the function set is signed by it"


def test_bad_groups_end_with_a_reason_and_not_the_run(tmp_path, url):
    place, seal = played(
        tmp_path, url, AWKWARD, custom_generate_function_path="PLUGIN:generate",
        rollout_sample_hook_path=["PLUGIN:hook"], max_group_attempts=2, rollout_batch_size=3,
    )  # fmt: skip
    by_id = {g.entry.group_id: g.entry for g in seal.groups if g.entry.complete}
    assert {g: e.verdict for g, e in by_id.items()} == {
        0: "kept", 1: "dropped", 2: "dropped", 3: "kept", 4: "kept",
    }  # fmt: skip
    assert by_id[1].reason == by_id[2].reason.replace("DataError", "PluginError") == "PluginError"
    rows = place.rows(seal)
    assert [s.status for s in rows[3, "kept"]] == [Status.FAILED, *[Status.COMPLETED] * 3]
    assert [s.remove_sample for s in rows[3, "kept"]] == [True, False, False, False]
    assert all(s.metadata["seen_in"] == [0, False] for s in rows[0, "kept"])


@pytest.mark.parametrize(("policy", "verdict"), [("train", "kept"), ("drop", "dropped")])
def test_failed_samples_as_configured(tmp_path, url, policy, verdict):
    place, seal = played(
        tmp_path, url, AWKWARD.replace("group_index == 1", "group_index < 0").replace(
            "group_index == 2", "group_index < 0"),
        custom_generate_function_path="PLUGIN:generate", failed_samples=policy,
    )  # fmt: skip
    found = {g.entry.group_id: (g.entry.verdict, g.entry.reason) for g in seal.groups}
    assert found[3][0] == verdict
    assert found[3][1] == ("failed_samples" if policy == "drop" else None)
    assert place.rows(seal)[3, verdict][0].remove_sample is False


HANGS = """
import asyncio
from slime.rollout.sglang_rollout import generate as plain

async def generate(args, sample, sampling_params):
    if sample.group_index == 1:
        await asyncio.Event().wait()
    sample = await plain(args, sample, sampling_params)
    if sample.group_index == 2:
        sample.status = sample.Status.ABORTED
    return sample
"""


def test_a_function_that_hangs_or_gives_up_costs_its_group(tmp_path, url):
    _, seal = played(
        tmp_path, url, HANGS, custom_generate_function_path="PLUGIN:generate",
        request_timeout_s=4.0, max_turns=1, max_group_attempts=1,
    )  # fmt: skip
    found = {g.entry.group_id: (g.entry.verdict, g.entry.reason) for g in seal.groups}
    assert found[1] == ("dropped", "DeadlineError")
    assert found[2] == ("dropped", "PluginError"), "aborted, though nobody stopped it"
    assert [found[group][0] for group in (0, 3, 4, 5)] == ["kept"] * 4


def test_a_function_that_is_cut_off_begins_anew_in_the_next_segment(tmp_path, url):
    (tmp_path / "plugin.py").write_text(UPSTREAM)
    place = Place(
        tmp_path, url, custom_generate_function_path=f"{tmp_path / 'plugin.py'}:generate",
        partial_rollout=True, over_sampling_batch_size=8, rollout_max_response_len=100,
    )  # fmt: skip

    async def body() -> None:
        worker = await place.ready()
        first, second = [await place.segment(worker, k) for k in (0, 1)]
        verdicts = [group.entry.verdict for group in first.groups]
        assert verdicts.count("kept") == 4 and len(first.returned) == 4
        ended = {group.entry.group_id for group in second.groups if group.entry.complete}
        assert ended & {group for group, _ in first.returned}
        for sample in kept(place, second):
            assert sum(sample.loss_mask) == sample.response_length - 4, "whole answers"

    asyncio.run(body())


def test_an_evaluation_dataset_has_its_own_function_and_grader(tmp_path, url):
    (tmp_path / "plugin.py").write_text(UPSTREAM)
    dataset = {
        "name": "turns", "path": "configs/quickstart/heldout.jsonl@[0:3]", "temperature": 1.0,
        "custom_generate_function_path": f"{tmp_path / 'plugin.py'}:generate",
        "custom_rm_path": f"{tmp_path / 'plugin.py'}:reward_func", "max_response_len": 40,
    }  # fmt: skip
    place = Place(
        tmp_path, url, eval_interval=1, eval_config={"datasets": [dataset]}, eval_reward_key="acc"
    )

    async def body() -> dict[str, float]:
        from slime_core.rollout.settings import EvalJob
        from slime_core.store.documents import read_document

        worker = await place.ready()
        result = await worker.evaluate(0, EvalJob(1, "l0-1", "turns"))
        return read_document(place.backend, result.uri).body["metrics"]

    metrics = asyncio.run(body())
    assert (metrics["reward"], metrics["samples"], metrics["reward/acc"]) == (1.0, 3.0, 1.0)
    assert metrics["reward/length"] > 4


CARELESS = """
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def generate(args, sample, sampling_params):
    '''Takes whatever comes for a whole answer, also one that was cut off.'''
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    if sample.group_index >= 4:
        sampling_params = {**sampling_params, "max_new_tokens": 240, "ignore_eos": True}
    output = await post(url, {"input_ids": sample.tokens, "sampling_params": sampling_params,
                              "return_logprob": True})
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs])
    sample.response, sample.status = output["text"], Sample.Status.COMPLETED
    return sample
"""


def test_answers_that_a_partial_rollout_cut_off_are_no_answers(tmp_path, url):
    _, seal = played(
        tmp_path, url, CARELESS, custom_generate_function_path="PLUGIN", partial_rollout=True,
        over_sampling_batch_size=8, rollout_max_response_len=240,
    )  # fmt: skip
    ended = {g.entry.group_id: g.entry.verdict for g in seal.groups}
    assert [g for g, v in ended.items() if v == "kept"] == [0, 1, 2, 3]
    assert [g for g, _ in seal.returned] == [4, 5, 6, 7], "they begin again"
    assert not [v for g, v in ended.items() if g >= 4 and v != "aborted"]
