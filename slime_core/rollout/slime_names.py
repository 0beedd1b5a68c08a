"""What slime's plug-ins import from slime, in terms of the rollout they run in."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from slime_core.errors import DeadlineError, EngineError, PluginError
from slime_core.plugins.upstream_args import ROUTER_HOST
from slime_core.rewards.result import Score, ScoreResult
from slime_core.rollout import generate as generation
from slime_core.rollout.custom import BEGUN, load_generate
from slime_core.rollout.drawn import as_drawn
from slime_core.rollout.runtime import current
from slime_core.sample import Sample, Status

RolloutBatch = dict[str, list]
HTTP_TIMEOUT_S = 600.0
HTTP_PAUSE_S = 1.0
CONCURRENT_REQUESTS = 4096  # the gate before the engines holds the real limit


@dataclass
class RolloutFnTrainOutput:
    """What a rollout function returns for training."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """What a rollout function returns for evaluation."""

    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: dict[str, Any] | None = None


class SingletonMeta(type):
    """Classes of which there is one instance."""

    _instances: dict[type, Any] = {}  # noqa: RUF012

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]


class OneInARollout(type):
    """Classes of which there is one instance in each rollout."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        singles = current().singles
        if cls not in singles:
            singles[cls] = super().__call__(*args, **kwargs)
        return singles[cls]


class GenerateState(metaclass=OneInARollout):
    """What slime's generate functions ask for: tokenizer, sampling parameters and a semaphore; and
    what its rollout loops keep. There is one in a rollout, so that whoever sets `aborted` stops
    all that was begun in it."""

    def __init__(self, args: Any = None) -> None:
        self._runtime = runtime = current()
        self.args = args if args is not None else runtime.args
        self.tokenizer = runtime.tokenizer
        self.processor = None
        self.semaphore = asyncio.Semaphore(CONCURRENT_REQUESTS)
        limit = runtime.sampling.max_response_tokens
        self.sampling_params = {**runtime.sampling.params, "max_new_tokens": limit}
        self.remaining_batch_size = 0
        self.pendings: set[asyncio.Task[Any]] = set()

    def reset(self) -> None:
        """Forgets what was begun."""
        self.remaining_batch_size = 0
        self.pendings = set()
        self.aborted = False

    def submit_generate_tasks(self, samples: Sequence[list[Sample]]) -> None:
        """Begins groups; their tasks are in `pendings`."""
        from slime_core.rollout.slime_rollout import generate_and_rm_group

        for group in samples:
            work = generate_and_rm_group(self.args, group, self.sampling_params.copy())
            self.pendings.add(asyncio.ensure_future(work))
        self.remaining_batch_size += len(samples)

    @property
    def aborted(self) -> bool:
        """The rollout is being stopped: what is begun from now on ends at once, as aborted."""
        return self._runtime.stopping()

    @aborted.setter
    def aborted(self, value: bool) -> None:
        self._runtime.abort.asked = value


async def post(
    url: str, payload: Any, max_retries: int = 60, headers: dict[str, str] | None = None
) -> Any:
    """The JSON answer to a POST. Requests to the router go to one of the run's engines.

    Raises:
        EngineError: no answer after `max_retries` tries.
        DeadlineError: none within ten minutes.
    """
    if urlsplit(url).hostname == ROUTER_HOST:
        if not urlsplit(url).path.rstrip("/").endswith("/generate"):
            raise EngineError(f"{url}: a generate function can use /generate of the router only")
        return await current().generate(payload)
    return await _http("POST", url, payload, max_retries, headers)


async def get(url: str, max_retries: int = 60) -> Any:
    """The JSON answer to a GET."""
    return await _http("GET", url, None, max_retries, None)


def init_http_client(args: Any = None) -> None:
    """Nothing has to be prepared here."""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One sample, token in and token out, with what it has so far as its beginning.

    Args:
        sampling_params: `max_new_tokens` counts over all calls for the sample.
    """
    runtime = current()
    params = dict(sampling_params)
    limit = params.pop("max_new_tokens", None)
    seed = params.pop("sampling_seed", None)
    generation.tokenize_prompt(sample, runtime.tokenizer, chat=True)
    total = runtime.sampling.max_response_tokens
    if limit is not None:  # over the whole response, as in slime, whatever was there at first
        total = min(total, limit + runtime.notes.get(BEGUN, {}).get(sample.index, 0))
    sampling = replace(runtime.sampling, params=params, max_response_tokens=total)
    seed_of = runtime.seed_of if seed is None else lambda _: seed
    await runtime.at_home(
        generation.generate([sample], runtime.gate, sampling, seed_of, runtime.stopping)
    )
    skip = bool(params.get("skip_special_tokens"))
    generation.decode_response(sample, runtime.tokenizer, skip)
    if sample.status is Status.PENDING:  # stopped before anything was sampled
        sample.status = Status.ABORTED
    return sample


async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """One sample with its reward; an aborted one where the rollout is being stopped."""
    if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
        if current().stopping():
            sample.status = Status.ABORTED
            return sample
        sample = await _answered(args, sample, sampling_params)
    group_rm = getattr(args, "group_rm", False) and not evaluation
    if sample.reward is None and sample.status is not Status.ABORTED and not group_rm:
        sample.reward = await async_rm(args, sample, evaluation=evaluation)
    return sample


async def _answered(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """By the configured generate function, unless that is what asks."""
    runtime = current()
    path = sample.generate_function_path or args.custom_generate_function_path
    if not path or "samples" in runtime.notes:
        return await generate(args, sample, sampling_params)
    own, drawn = replace(runtime, versions=[], notes={}), begin_again(sample)
    rows = await runtime.at_home(load_generate(path).run(own, [sample]))
    if own.cut and own.stopping() and all(row.status is not Status.ABORTED for row in rows):
        return drawn  # it took a cut-off answer for a whole one
    if len(rows) != 1:
        raise PluginError(
            f"{path} made {len(rows)} rows of one sample, which generate_and_rm cannot return: "
            "call it in your rollout function"
        )
    return rows[0]


def begin_again(sample: Sample) -> Sample:
    """A sample as it was drawn, to be answered from its prompt on."""
    drawn = as_drawn(sample)
    drawn.status = Status.ABORTED
    return drawn


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Any:
    """The reward of a sample by the configured grader.

    Raises:
        RewardError: it could not be graded.
    """
    runtime = current()
    result = await runtime.at_home(
        runtime.hub.score(sample, evaluation=bool(kwargs.get("evaluation")))
    )
    return _value(result)


async def batched_async_rm(args: Any, samples: Sequence[Sample], **kwargs: Any) -> list[Any]:
    """The rewards of several samples; with group_rm they are graded together.

    Raises:
        RewardError: one could not be graded.
    """
    runtime, evaluation = current(), bool(kwargs.get("evaluation"))
    results = await runtime.at_home(runtime.hub.score_group(samples, evaluation=evaluation))
    return [_value(result) for result in results]


def _value(result: ScoreResult) -> Any:
    if not isinstance(result, Score):
        result.raise_error()
        raise AssertionError("unreachable")
    return result.value


def pop_first(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """The oldest groups of a buffer, taken out of it."""
    taken = buffer[:num_samples]
    del buffer[: len(taken)]
    return taken


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine from plain code: on the loop of the rollout where another thread asks, else
    on a loop and thread of its own.

    Raises:
        PluginError: asked for on the loop of the rollout itself.
        whatever the coroutine raises.
    """
    try:
        home = current().home
    except PluginError:
        home = None
    if home is not None and home is _running_loop():
        coroutine.close()
        raise PluginError("run() would block the loop that it waits for: await the coroutine here")
    if home is not None and home.is_running():
        return asyncio.run_coroutine_threadsafe(coroutine, home).result()
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1, "slime-run") as pool:
        return pool.submit(context.run, asyncio.run, coroutine).result()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _http(
    method: str, url: str, payload: Any, tries: int, headers: dict[str, str] | None
) -> Any:
    import httpx

    problem = ""
    try:
        async with (
            asyncio.timeout(HTTP_TIMEOUT_S),
            httpx.AsyncClient(timeout=HTTP_TIMEOUT_S, trust_env=False) as client,
        ):
            for attempt in range(max(1, tries)):
                if attempt:
                    await asyncio.sleep(HTTP_PAUSE_S)
                try:
                    answer = await client.request(method, url, json=payload, headers=headers)
                    answer.raise_for_status()
                    return answer.json()
                except (httpx.HTTPError, ValueError) as error:
                    problem = f"{type(error).__name__}: {error}"
    except TimeoutError as error:
        raise DeadlineError(f"waited {HTTP_TIMEOUT_S:.0f} s for {url}: {problem}") from error
    raise EngineError(f"{url}: no answer in {tries} tries; the last: {problem}")
