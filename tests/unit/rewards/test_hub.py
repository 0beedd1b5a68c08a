import asyncio
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from slime_core.errors import ConfigError, PluginError
from slime_core.rewards.hub import RewardHub, RewardSettings
from slime_core.rewards.remote import RemoteGrader, RemoteSettings
from slime_core.rewards.result import Score
from slime_core.sample import Sample


def score(sample, args=None, evaluation=False, **settings):
    async def run():
        hub = RewardHub(RewardSettings(**settings), args)
        try:
            return await hub.score(sample, evaluation=evaluation)
        finally:
            await hub.close()

    return asyncio.run(run())


def score_group(samples, args=None, evaluation=False, **settings):
    async def run():
        hub = RewardHub(RewardSettings(**settings), args)
        try:
            return await hub.score_group(samples, evaluation=evaluation)
        finally:
            await hub.close()

    return asyncio.run(run())


@pytest.fixture
def plugin(tmp_path):
    def write(body, name="rm.py"):
        path = tmp_path / name
        path.write_text(body)
        return str(path)

    return write


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("1258", 1.0),
        (" 1258\n", 1.0),
        ("1258<eos>", 1.0),
        ("1258<|im_end|>\n<eos><pad>", 1.0),
        ("1258<turn>", 1.0),
        ("<eos>1258", 0.0),
        ("1258 <eos> more", 0.0),
        ("12580", 0.0),
        ("", 0.0),
    ],
)
def test_exact_match_ignores_space_and_end_tokens_only(response, number):
    result = score(
        Sample(response=response, label="1258"), rm_type="exact_match", end_tokens=("<turn>",)
    )
    assert isinstance(result, Score)
    assert result.number == result.value == number
    assert len(result.grader) == 64


def test_the_answer_in_the_metadata_stands_in_for_a_label():
    sample = Sample(response="7", metadata={"answer": 7})
    assert score(sample, rm_type="exact_match").number == 1.0
    missing = score(Sample(response="7"), rm_type="exact_match")
    assert missing.reason == "no_label"
    assert "--label-key" in missing.message


PRIORITY = """
async def one(args, sample, **kwargs): return 1.0
async def two(args, sample, **kwargs): return 2.0
"""


def test_priority_is_sample_path_then_setting_then_metadata_then_type(plugin):
    path = plugin(PRIORITY)
    settings = {"rm_type": "exact_match"}
    sample = Sample(response="a", label="a", metadata={"rm_type": "no_such"})
    with pytest.raises(ConfigError, match="unknown --rm-type 'no_such'"):
        score(sample, **settings)
    settings["custom_rm_path"] = f"{path}:one"
    assert score(sample, **settings).number == 1.0
    sample.custom_rm_path = f"{path}:two"
    assert score(sample, **settings).number == 2.0


def test_wrong_settings_are_said_at_the_start(plugin):
    for settings, error, message in (
        ({"rm_type": "exact_mach"}, ConfigError, "did you mean exact_match"),
        ({"rm_type": "remote_rm"}, ConfigError, "needs --rm-url"),
        ({"group_rm": True}, ConfigError, "set --custom-rm-path"),
        ({"custom_rm_path": "no/such.py:f"}, PluginError, "no such file"),
        ({"custom_rm_path": plugin("async def f(a): ...")}, PluginError, "does not fit"),
    ):
        with pytest.raises(error, match=message):
            RewardHub(RewardSettings(**settings))
    with pytest.raises(ConfigError, match="no grader: set --rm-type"):
        score(Sample())


CUSTOM = """
import asyncio
async def reward_func(args, sample, **kwargs):
    assert args.scale == 2 and not kwargs
    return args.scale * len(sample.response)
async def wants_evaluation(args, sample, evaluation=None): return float(evaluation)
async def raises(args, sample): raise KeyError("x")
async def slow(args, sample): await asyncio.sleep(60)
async def own_timeout(args, sample): raise TimeoutError("my own")
async def text(args, sample): return "1.0"
async def none(args, sample): return None
async def nan(args, sample): return float("nan")
async def inf(args, sample): return float("inf")
async def boolean(args, sample): return True
async def several(args, sample): return {"score": 1, "format": 0.5}
async def nested(args, sample): return {"score": [1]}
def plain(args, sample): return args.scale + len(sample.response)
class Args: scale = 2
"""


class Args:
    def __init__(self):
        self.scale = 2


@pytest.mark.parametrize(
    ("name", "number"), [("reward_func", 6), ("wants_evaluation", 0), ("boolean", 1), ("plain", 5)]
)
def test_custom_functions(name, number, plugin):
    path = f"{plugin(CUSTOM)}:{name}"
    result = score(Sample(response="abc"), Args(), custom_rm_path=path)
    assert (result.number, type(result.number)) == (number, float)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "exception"),
        ("slow", "timeout"),
        ("own_timeout", "exception"),
        ("text", "not_a_number"),
        ("none", "not_a_number"),
        ("nan", "non_finite"),
        ("inf", "non_finite"),
        ("several", "reward_key"),
    ],
)
def test_a_custom_function_that_fails_is_typed(name, reason, plugin):
    path = f"{plugin(CUSTOM)}:{name}"
    result = score(Sample(), custom_rm_path=path, reward_timeout_s=0.2)
    assert result.reason == reason
    assert name in result.message


def test_dict_rewards_need_their_key(plugin):
    path = plugin(CUSTOM)
    several = {"custom_rm_path": f"{path}:several", "reward_key": "score"}
    result = score(Sample(), **several)
    assert (result.value, result.number) == ({"score": 1, "format": 0.5}, 1.0)
    assert score(Sample(), evaluation=True, eval_reward_key="format", **several).number == 0.5
    assert score(Sample(), evaluation=True, **several).number == 1.0
    missing = score(Sample(), **several | {"reward_key": "acc"})
    assert missing.reason == "reward_key" and "score, format" in missing.message
    key_without_dict = score(Sample(response="a", label="a"), rm_type="exact_match", reward_key="k")
    assert key_without_dict.reason == "reward_key"
    evaluated = score(
        Sample(response="a", label="a"), evaluation=True, rm_type="exact_match", reward_key="k"
    )
    assert evaluated.number == 1.0, "an evaluation's own grader need not know the key"
    nested = score(Sample(), custom_rm_path=f"{path}:nested", reward_key="score")
    assert nested.reason == "not_a_number"


def test_a_variant_changes_the_grader_and_shares_the_workers(plugin):
    sample = Sample(response="it is 7", label="7")

    async def run():
        hub = RewardHub(RewardSettings(custom_rm_path=f"{plugin(CUSTOM)}:boolean"))
        other = hub.variant(rm_type="gsm8k", custom_rm_path=None)
        try:
            results = [await one.score(sample) for one in (hub, other)]
            await other.close()
            return [*results, await hub.variant(rm_type="f1", custom_rm_path=None).score(sample)]
        finally:
            await hub.close()

    results = asyncio.run(run())
    assert [result.number for result in results] == [1.0, 1.0, 0.5]
    assert len({result.grader for result in results}) == 3


BATCHED = """
CALLS = []
async def batched_custom_rm(args, samples, **kwargs):
    CALLS.append(len(samples))
    return [len(sample.response) for sample in samples]
async def short(args, samples): return [1.0]
async def one_bad(args, samples): return [1.0, None, 3.0]
async def raises(args, samples): raise ValueError("no")
def not_async(args, samples): return [1.0]
"""


def test_a_group_function_is_called_once_with_all_members(plugin):
    from slime_core.plugins.load import load

    path = plugin(BATCHED)
    group = [Sample(response="a" * n) for n in (3, 1, 2)]
    results = score_group(group, custom_rm_path=path, group_rm=True)
    assert [result.number for result in results] == [3.0, 1.0, 2.0]
    assert load(f"{path}:CALLS") == [3]


def test_group_functions_that_fail_are_typed_for_each_member(plugin):
    path = plugin(BATCHED)
    group = [Sample(), Sample(), Sample()]
    for name, reasons in (
        ("short", ["wrong_count"] * 3),
        ("raises", ["exception"] * 3),
        ("one_bad", [None, "not_a_number", None]),
    ):
        results = score_group(group, custom_rm_path=f"{path}:{name}", group_rm=True)
        assert [getattr(result, "reason", None) for result in results] == reasons
    with pytest.raises(PluginError, match="must be `async def`"):
        RewardHub(RewardSettings(custom_rm_path=f"{path}:not_async", group_rm=True))


def test_a_group_without_group_function_is_graded_one_by_one_in_order():
    group = [Sample(response=str(n), label="1") for n in range(3)]
    results = score_group(group, rm_type="exact_match")
    assert [result.number for result in results] == [0.0, 1.0, 0.0]


def test_the_digest_names_grader_and_source(plugin):
    hub = RewardHub(RewardSettings(rm_type="exact_match"))
    path = plugin(PRIORITY)
    other = plugin(PRIORITY + "# changed", "other.py")
    samples = [
        Sample(),
        Sample(metadata={"rm_type": "random"}),
        Sample(metadata={"rm_type": "boxed_exact_match"}),
        Sample(custom_rm_path=f"{path}:one"),
        Sample(custom_rm_path=f"{path}:two"),
        Sample(custom_rm_path=f"{other}:one"),
    ]
    digests = [hub.grader_digest(sample) for sample in samples]
    assert len(set(digests)) == len(samples)
    assert digests == [hub.grader_digest(sample) for sample in samples]


@pytest.mark.parametrize(
    ("response", "number"), [("so \\boxed{ 7 }.", 1.0), ("so 7", 0.0), ("\\boxed{1} \\boxed{7}", 1)]
)
def test_boxed_prefix_grades_what_stands_in_the_box(response, number):
    result = score(Sample(response=response, label="7"), rm_type="boxed_exact_match")
    assert result.number == number


def test_random_gives_both_values():
    results = score_group([Sample()] * 64, rm_type="random")
    assert {result.number for result in results} == {0.0, 1.0}


@pytest.fixture
def server():
    """A reward server; `server.answers` are (status, body) in turn, the last one repeats."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            self.server.bodies.append(json.loads(body))
            answers = self.server.answers
            status, text = answers.pop(0) if len(answers) > 1 else answers[0]
            if status == "hang":
                self.server.released.wait(20)
            self.send_response(status if isinstance(status, int) else 200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    from threading import Event

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies, server.answers, server.released = [], [], Event()
    server.url = f"http://127.0.0.1:{server.server_address[1]}/score"
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


def test_remote_rewards_get_prompt_response_and_label(server):
    server.answers = [(200, "0.25")]
    sample = Sample(prompt="p", response="r<eos>", label="l")
    assert score(sample, rm_type="remote_rm", rm_url=server.url).number == 0.25
    assert server.bodies == [{"prompt": "p", "response": "r", "label": "l"}]


@pytest.mark.parametrize(
    ("answers", "outcome", "asked"),
    [
        ([(503, "busy"), (429, "slow down"), (200, "1")], 1, 3),
        ([(400, "bad prompt")], "bad prompt", 1),
        ([(200, "<html>")], "no JSON", 1),
        ([(500, "broken")], "500", 3),
    ],
)
def test_remote_retries_what_may_pass(answers, outcome, asked, server):
    server.answers = answers

    async def run():
        grader = RemoteGrader(RemoteSettings(server.url, attempts=3, max_backoff_s=0.01))
        try:
            return await grader.grade({}, 10.0)
        finally:
            await grader.close()

    value = asyncio.run(run())
    assert outcome in value.message if isinstance(outcome, str) else value == outcome
    assert len(server.bodies) == asked


def test_remote_has_a_deadline_over_all_attempts(server):
    server.answers = [("hang", "1")]
    settings = {"rm_type": "remote_rm", "rm_url": server.url, "reward_timeout_s": 0.3}
    assert score(Sample(), **settings).reason == "timeout"
    assert score(Sample(), **settings | {"rm_url": "http://127.0.0.1:9/"}).reason == "timeout"


RAISING = """
def helper(sample):
    raise KeyError(sample.response)

def plain(args, sample): return helper(sample)
async def awaited(args, sample): return helper(sample)
"""


@pytest.mark.parametrize("name", ["plain", "awaited"])
def test_where_a_function_raises_is_logged_once_however_often_it_does(plugin, caplog, name):
    path = f"{plugin(RAISING)}:{name}"
    samples = [Sample(response="a"), Sample(response="b"), Sample(response="c")]
    results = score_group(samples, custom_rm_path=path)
    assert [result.message for result in results] == [
        f"{path} raised KeyError: 'a'", f"{path} raised KeyError: 'b'",
        f"{path} raised KeyError: 'c'",
    ]  # fmt: skip
    (record,) = [one for one in caplog.records if one.name == "slime_core.rewards.hub"]
    assert record.getMessage().startswith(f"{path} raised KeyError: ")
    assert "rm.py" in record.getMessage() and "in helper" in record.getMessage()


BLOCKING = """
import asyncio, time
async def sleeps(args, sample):
    time.sleep(0.6)
    return 1.0
async def hangs(args, sample):
    if sample.prompt == "hang":
        time.sleep(3.0)
    return 1.0
async def own_timeout(args, sample):
    raise TimeoutError("the server said so")
"""


def test_an_async_reward_that_blocks_holds_up_nobody_else(plugin):
    """Requests to the engine, acknowledgements and the gate live on the loop that asks."""

    async def body():
        hub = RewardHub(RewardSettings(custom_rm_path=plugin(BLOCKING) + ":sleeps"))
        grading = asyncio.ensure_future(hub.score(Sample()))
        longest, before = 0.0, time.monotonic()
        while not grading.done():
            await asyncio.sleep(0.01)
            now = time.monotonic()
            longest, before = max(longest, now - before), now
        await hub.close()
        return grading.result(), longest

    result, longest = asyncio.run(body())
    assert isinstance(result, Score) and result.value == 1.0
    assert longest < 0.4


def test_one_that_never_lets_go_costs_its_sample_and_the_next_is_graded(plugin):
    async def body():
        settings = RewardSettings(custom_rm_path=plugin(BLOCKING) + ":hangs", reward_timeout_s=0.3)
        hub = RewardHub(settings)
        first = await hub.score(Sample(prompt="hang"))
        second = await hub.score(Sample(prompt="go"))
        await hub.close()
        return first, second

    first, second = asyncio.run(body())
    assert (first.reason, second.value) == ("timeout", 1.0)
    assert "without letting its thread go" in first.message


def test_a_functions_own_time_out_is_no_deadline_of_ours(plugin):
    result = score(Sample(), custom_rm_path=plugin(BLOCKING) + ":own_timeout")
    assert result.reason == "exception" and "the server said so" in result.message
