"""Agents through the real worker, a real engine and real HTTP, errors and kill -9 included."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from slime_core.sample import Sample
from slime_core.store import layout
from slime_core.store.seal import Seal
from tests.integration.rollout.places import Place

AGENT = '''
"""Asks up to three times; dies with its whole process once KILL_AT answers have come in."""
import os
from pathlib import Path

import httpx

SEEN = Path(__file__).with_name("seen")
KILL_AT = int(os.environ.get("KILL_AT", "0"))

async def agent(base_url, api_key, sample):
    messages = [{"role": "user", "content": sample.prompt}]
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}) as client:
        for number in range(3):
            answer = await client.post(f"{base_url}/chat/completions", timeout=180,
                                       json={"model": "m", "messages": messages})
            said = answer.json()["choices"][0]["message"]["content"]
            with SEEN.open("a") as file:
                file.write(".")
            if KILL_AT and SEEN.stat().st_size >= KILL_AT:
                os.kill(os.getpid(), 9)
            if said == sample.label:
                return 0.5 ** number
            messages += [{"role": "assistant", "content": said},
                         {"role": "user", "content": sample.prompt}]
    return 0.0
'''

BAD = """
import asyncio, httpx

async def ask(base_url, api_key, sample):
    head, body = {"authorization": f"Bearer {api_key}"}, {
        "messages": [{"role": "user", "content": sample.prompt}]}
    async with httpx.AsyncClient(headers=head) as client:
        return await client.post(f"{base_url}/chat/completions", json=body, timeout=180)

async def agent(base_url, api_key, sample):
    kind = sample.index % 4
    if kind == 0:
        return 1.0
    await ask(base_url, api_key, sample)
    if kind == 1:
        raise RuntimeError("I am lost")
    if kind == 2:
        await asyncio.sleep(60)
    return {0: 0.5, 1: float("nan"), 2: "good"}.get(sample.group_index, 0.25)
"""

WORK = """
import asyncio, sys
from pathlib import Path
from tests.integration.rollout.places import Place

folder, url, plugin = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
place = Place(folder, url, agent_path=plugin, rm_type=None, max_turns=3,
              rollout_max_response_len=32)

async def body():
    await place.segment(await place.ready(), 0)

asyncio.run(body())
"""
OPTIONS = {"rm_type": None, "max_turns": 3, "rollout_max_response_len": 32}


def place_of(folder: Path, url: str, source: str, **changes: Any) -> Place:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "agent.py").write_text(source)
    return Place(folder, url, agent_path=str(folder / "agent.py"), **{**OPTIONS, **changes})


def segment(place: Place, epoch: int = 0) -> Seal:
    async def body() -> Seal:
        return await place.segment(await place.ready(epoch), 0, epoch)

    return asyncio.run(body())


def rows_of(place: Place, seal: Seal) -> list[Sample]:
    return sorted((s for rows in place.rows(seal).values() for s in rows), key=lambda s: s.index)


def requests_of(url: str) -> int:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("sglang:num_requests_total{")]
    return int(float(found[0].split()[-1])) if found else 0


def test_each_agent_becomes_a_row_of_its_own_turns(tmp_path, url):
    place = place_of(tmp_path, url, AGENT)
    rows = rows_of(place, segment(place))
    assert len(rows) == 16 and len({row.session_id for row in rows}) == 16
    for row in rows:
        turns = row.metadata["round_number"]
        right = row.response == row.label
        assert row.reward == (0.5 ** (turns - 1) if right else 0.0) and (right or turns == 3)
        put = [span.length for span in row.spans if not span.trainable]
        assert put == [len("1234=")] * (turns - 1), "between the turns stands the question alone"
        known = zip(row.rollout_log_probs or [], row.loss_mask or [], strict=True)
        assert all((value < 0) == bool(mask) for value, mask in known)
    assert not place.backend.list(layout.SESSIONS), "once sealed, the groups hold the turns"


@pytest.mark.slow
def test_a_killed_worker_costs_at_most_the_turns_that_were_under_way(tmp_path, url):
    whole = place_of(tmp_path / "whole", url, AGENT)
    before = requests_of(url)
    undisturbed = rows_of(whole, segment(whole))
    turns = sum(row.metadata["round_number"] for row in undisturbed)
    assert requests_of(url) - before == turns, "every turn is one request"

    cut = place_of(tmp_path / "cut", url, AGENT)
    plugin = cut.overrides["agent_path"]
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(cut.folder), url, plugin],
        env={**os.environ, "KILL_AT": str(turns // 2)}, timeout=300, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    recorded = len(cut.backend.list(layout.sessions(0)))
    assert recorded >= turns // 2, "an answer is in the store before its agent sees it"
    before = requests_of(url)
    resumed = rows_of(cut, segment(cut, epoch=1))
    assert requests_of(url) - before == turns - recorded
    for one, other in zip(undisturbed, resumed, strict=True):
        assert (one.tokens, one.loss_mask) == (other.tokens, other.loss_mask)
        assert one.reward == other.reward
        assert one.rollout_log_probs == other.rollout_log_probs


def test_what_goes_wrong_with_an_agent_has_a_name_and_costs_its_sample(tmp_path, url):
    place = place_of(tmp_path, url, BAD, agent_timeout_s=8.0)
    rows = rows_of(place, segment(place))
    told = {}
    for row in rows:
        error = row.metadata.get("reward_error", {})
        told[row.group_index, row.index % 4] = error.get("reason")
        assert bool(error) == row.remove_sample == (row.reward == 0.0)
    for group in range(4):
        assert [told[group, kind] for kind in range(3)] == [
            "agent_silent", "agent_error", "agent_timeout"]  # fmt: skip
    assert told[0, 3] is None and told[3, 3] is None
    assert (told[1, 3], told[2, 3]) == ("non_finite", "not_a_number")


def test_no_more_agents_work_at_once_than_may(tmp_path, url):
    counting = """
import asyncio
WORKING, MOST = [0], [0]

async def agent(base_url, api_key, sample):
    WORKING[0] += 1
    MOST[0] = max(MOST[0], WORKING[0])
    await asyncio.sleep(0.02)
    WORKING[0] -= 1
    raise RuntimeError(f"at most {MOST[0]}")
"""
    limits = {"agent_concurrency": 3, "reward_error_policy": "zero"}
    place = place_of(tmp_path, url, counting, **limits)
    rows = rows_of(place, segment(place))
    told = {row.metadata["rollout_error"]["message"].rpartition(" ")[2] for row in rows}
    assert max(map(int, told)) == 3


def test_without_a_reward_of_its_own_an_agent_is_graded(tmp_path, url):
    silent = AGENT.replace("return 0.5 ** number", "return").replace("return 0.0", "return")
    place = place_of(tmp_path, url, silent, rm_type="exact_match")
    for row in rows_of(place, segment(place)):
        assert row.reward == float(row.response == row.label)


def test_an_agent_that_blocks_holds_up_neither_the_engine_nor_who_answers_it(tmp_path, url):
    source = """
import httpx

async def agent(base_url, api_key, sample):
    head = {"authorization": f"Bearer {api_key}"}
    with httpx.Client(headers=head) as client:
        answer = client.post(f"{base_url}/chat/completions", timeout=180, json={
            "messages": [{"role": "user", "content": sample.prompt}]})
    return float(answer.status_code == 200)
"""
    place = place_of(tmp_path, url, source)
    rows = rows_of(place, segment(place))
    assert len(rows) == 16 and all(row.reward == 1.0 for row in rows)
