"""Settings of rewards and lengths, seen in what the worker stores."""

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from slime_core.errors import DataError
from slime_core.rollout.scoring import GradingStoppedError
from slime_core.sample import Sample, Status
from slime_core.store.seal import Seal
from tests.integration.rollout.places import Place

GRADER = """
import os, time

def reward(args, sample, **kwargs):
    if sample.group_index == 1:
        raise ValueError("no idea")
    if sample.group_index == 2 and sample.index % 4 == 0:
        time.sleep(60)
    if sample.group_index == 3 and sample.index % 4 == 0:
        os._exit(3)
    return len(sample.response)

def unsure(args, sample, **kwargs):
    if sample.group_index == 1:
        raise ValueError("no idea")
    return len(sample.response)
"""


def segment(folder: Path, url: str, **overrides: Any) -> tuple[Place, Seal]:
    place = Place(folder, url, **overrides)

    async def body() -> Seal:
        return await place.segment(await place.ready(), 0)

    return place, asyncio.run(body())


def everything(place: Place, seal: Seal) -> list[Sample]:
    return [sample for samples in place.rows(seal).values() for sample in samples]


@pytest.fixture
def grader(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "rm.py").write_text(GRADER)
    path = f"{tmp_path / 'rm.py'}:reward"
    return {"custom_rm_path": path, "rm_type": None, "reward_timeout_s": 2.0, "reward_workers": 2}


def test_graders_that_hang_exit_or_raise_cost_their_samples_only(tmp_path, url, grader):
    place, seal = segment(tmp_path, url, **grader)
    found = {g.entry.group_id: (g.entry.verdict, g.entry.reason) for g in seal.groups}
    assert found[1] == ("dropped", "reward_error/exception"), "none of it could be graded"
    assert [found[group] for group in (0, 2, 3, 4)] == [("kept", None)] * 4
    rows = place.rows(seal)
    for group, reason in ((2, "timeout"), (3, "crash")):
        bad, *good = rows[group, "kept"]
        assert bad.metadata["reward_error"]["reason"] == reason and bad.remove_sample
        assert all(s.reward == len(s.response) and not s.remove_sample for s in good)


def test_zero_drop_and_fail_are_what_they_say(tmp_path, url, grader):
    unsure = grader | {"custom_rm_path": grader["custom_rm_path"].replace(":reward", ":unsure")}
    place, seal = segment(tmp_path / "zero", url, **unsure, reward_error_policy="zero")
    zero = place.rows(seal)
    assert [(s.reward, s.remove_sample) for s in zero[1, "kept"]] == [(0.0, False)] * 4
    _, seal = segment(tmp_path / "drop", url, **unsure, reward_error_policy="drop")
    verdicts = {g.entry.group_id: g.entry.verdict for g in seal.groups}
    assert verdicts == {0: "kept", 1: "dropped", 2: "kept", 3: "kept", 4: "kept"}
    with pytest.raises(GradingStoppedError, match="reward_error_policy is fail"):
        segment(tmp_path / "fail", url, **unsure, reward_error_policy="fail")


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        body = json.dumps(float(asked["label"] in asked["response"]) + 2).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def judge() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_a_reward_server_grades(tmp_path, url, judge):
    place, seal = segment(tmp_path, url, rm_type="remote_rm", rm_url=judge)
    for sample in everything(place, seal):
        assert sample.reward == float(sample.label in sample.response) + 2


def test_length_limits_hold_for_prompt_and_response_together(tmp_path, url):
    place, seal = segment(tmp_path, url, rollout_max_context_len=8, rollout_max_response_len=20)
    samples = everything(place, seal)
    assert {len(sample.tokens) for sample in samples} <= {6, 7, 8}
    cut = [sample for sample in samples if len(sample.tokens) == 8]
    assert cut and all(s.status is Status.TRUNCATED for s in cut if s.tokens[-1] != 2)


def test_long_prompts_are_left_out(tmp_path, url):
    place = Place(tmp_path, url, rollout_max_prompt_len=4)
    with pytest.raises(DataError, match=r"all 4096 prompts are longer than .* 4"):
        asyncio.run(place.ready())
