"""What fields of the configuration are on the wire: the bodies that an engine receives."""

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from typing import Any

import pytest

from slime_core.data.tokenizer import load_tokenizer
from slime_core.rollout.settings import EvalJob
from tests.integration.rollout.places import Place, close_at_the_end

HELD_OUT = "configs/quickstart/heldout.jsonl@[0:3]"
Body = dict[str, Any]


class Recorder:
    """An engine that ends each answer with one token, keeps what it was asked, and counts how many
    requests are open at once. It begins to answer when `wait_for` of them are open."""

    def __init__(self) -> None:
        self.bodies: list[Body] = []
        self.most_at_once = 0
        self.wait_for = 0
        self._open = 0
        self._changed = Condition()

    def answer(self, body: Body) -> Any:
        samples = len(body["input_ids"])
        with self._changed:
            self.bodies.append(body)
            self._open += samples
            self.most_at_once = max(self.most_at_once, self._open)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most_at_once >= self.wait_for, timeout=10)
            self._open -= samples
        return [self._one(len(tokens)) for tokens in body["input_ids"]]

    def _one(self, prompt_tokens: int) -> Body:
        meta = {
            "id": "r", "finish_reason": {"type": "stop"}, "weight_version": "l0-0",
            "output_token_logprobs": [[-0.5, 5, None]], "prompt_tokens": prompt_tokens,
        }  # fmt: skip
        return {"text": "5", "output_ids": [5], "meta_info": meta}


@pytest.fixture
def engine() -> Iterator[tuple[str, Recorder]]:
    recorder = Recorder()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            answer = json.dumps(recorder.answer(body)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", recorder
    server.shutdown()
    server.server_close()


def asked(tmp_path, engine: tuple[str, Recorder], name: str, **overrides: Any) -> list[Body]:
    """The bodies of one segment, ordered by prompt."""
    url, recorder = engine
    recorder.bodies.clear()
    (tmp_path / name).mkdir()

    async def scenario() -> None:
        place = Place(tmp_path / name, url, **overrides)
        await place.segment(await place.ready(), 0)

    asyncio.run(scenario())
    return sorted(recorder.bodies, key=lambda body: str(body["input_ids"]))


def sampling(bodies: list[Body]) -> list[Body]:
    return [params for body in bodies for params in _each(body)]


def _each(body: Body) -> list[Body]:
    params = body["sampling_params"]
    return params if isinstance(params, list) else [params] * len(body["input_ids"])


def seeds(bodies: list[Body]) -> set[int]:
    return {params["sampling_seed"] for params in sampling(bodies)}


def test_sampling_is_what_the_configuration_says(tmp_path, engine):
    bodies = asked(
        tmp_path, engine, "a", rollout_temperature=0.7, rollout_top_p=0.9, rollout_top_k=11,
        rollout_stop=["x"], rollout_stop_token_ids=[7], rollout_skip_special_tokens=True,
        rollout_max_response_len=9, rollout_batch_size=3, n_samples_per_prompt=5,
        num_steps_per_rollout=1, global_batch_size=None,
    )  # fmt: skip
    assert sum(len(body["input_ids"]) for body in bodies) == 3 * 5
    assert len({str(body["input_ids"][0]) for body in bodies}) == 3
    wanted = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 11, "stop": ["x"], "stop_token_ids": [7],
        "skip_special_tokens": True, "max_new_tokens": 9,
    }  # fmt: skip
    for params in sampling(bodies):
        assert wanted.items() <= params.items()


def test_seeds_of_requests_follow_both_seeds_and_nothing_else(tmp_path, engine):
    first = seeds(asked(tmp_path, engine, "a"))
    assert first == seeds(asked(tmp_path, engine, "b"))
    assert not first & seeds(asked(tmp_path, engine, "c", seed=77))
    assert not first & seeds(asked(tmp_path, engine, "d", rollout_seed=77))


def test_prompts_are_those_of_file_key_order_and_slice(tmp_path, engine):
    def prompts(name: str, **overrides: Any) -> list[str]:
        return [str(b["input_ids"][0]) for b in asked(tmp_path, engine, name, **overrides)]

    rows = [{"q": f"{n}{n}{n}{n}=", "label": f"{n}{n}{n}{n}"} for n in range(1, 9)]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"prompt_data": str(path), "input_key": "q"}
    plain = prompts("a", **given, rollout_shuffle=False)
    assert len(set(plain)) == 4
    assert prompts("b", **given, rollout_shuffle=True) != plain
    last = prompts("c", **{**given, "prompt_data": f"{path}@[4:8]"}, rollout_shuffle=False)
    assert not set(last) & set(plain)


@pytest.mark.parametrize("limit", [4, 8])
def test_as_many_requests_are_open_as_an_engine_may_have(tmp_path, engine, limit):
    engine[1].wait_for = limit
    bodies = asked(
        tmp_path, engine, "a", rollout_batch_size=12, n_samples_per_prompt=2,
        num_steps_per_rollout=1, global_batch_size=None, sglang_server_concurrency=limit,
    )  # fmt: skip
    assert sum(len(body["input_ids"]) for body in bodies) == 24
    assert engine[1].most_at_once == limit


def test_evaluation_has_sampling_of_its_own(tmp_path, engine):
    url, recorder = engine

    async def scenario() -> None:
        place = Place(
            tmp_path, url, eval_interval=1, eval_prompt_data=["held", HELD_OUT],
            n_samples_per_eval_prompt=2, eval_temperature=0.3, eval_top_p=0.8, eval_top_k=4,
            eval_max_response_len=6,
        )  # fmt: skip
        worker = await place.ready()
        await worker.evaluate(0, EvalJob(0, "l0-0", "held"))

    asyncio.run(scenario())
    wanted = {"temperature": 0.3, "top_p": 0.8, "top_k": 4, "max_new_tokens": 6}
    params = sampling(recorder.bodies)
    assert len(params) == 3 * 2
    assert all(wanted.items() <= one.items() for one in params)


def test_media_are_in_requests_and_in_the_store(tmp_path, engine):
    """Strings as they are, bytes as data URIs; each sample of a request has its own."""
    url, recorder = engine
    rows = [{"input": f"1 <image>{i}", "label": "1", "pics": [f"http://x/{i}.png"]}
            for i in range(4)]  # fmt: skip
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    place = Place(
        tmp_path, url, prompt_data=str(prompts), multimodal_keys={"image": "pics"},
        apply_chat_template=True, rollout_shuffle=False,
    )  # fmt: skip

    async def body() -> Any:
        worker = place.worker()
        with pytest.MonkeyPatch.context() as patch:
            plain = load_tokenizer(worker._config.rollout.hf_checkpoint)
            plain.chat_template = TEMPLATE
            patch.setattr("slime_core.rollout.worker.load_tokenizer", lambda folder: plain)
            await worker.setup()
        closing = close_at_the_end(worker)
        await worker.fence(0)
        await worker.set_engines([url])
        await worker.open_gate()
        assert not closing.done()
        return await place.segment(worker, 0)

    seal = asyncio.run(body())
    sent = {tuple(map(tuple, b["image_data"])) for b in recorder.bodies}
    assert sent == {((f"http://x/{i}.png",),) * 4 for i in range(4)}
    stored = [s for group in place.rows(seal).values() for s in group]
    assert {s.multimodal_inputs["images"][0] for s in stored} == {f"http://x/{i}.png"
                                                                 for i in range(4)}  # fmt: skip


TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text or '7' }}{% endfor %}{% endif %}{% endfor %}"
)
