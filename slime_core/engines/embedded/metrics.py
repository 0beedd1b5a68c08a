"""/metrics under SGLang's names, written by prometheus_client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from slime_core.engines.embedded.request import Request
from slime_core.engines.embedded.scheduler import Scheduler

FamilyType = type[GaugeMetricFamily] | type[CounterMetricFamily]
BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


@dataclass(frozen=True)
class Load:
    """What the engine does right now, read between two steps.

    Attributes:
        running: requests that decode.
        waiting: requests that wait for a place.
        tokens: tokens of all running requests.
    """

    running: int
    waiting: int
    tokens: int
    paused: bool
    prompt_tokens_total: int
    output_tokens_total: int
    cached_tokens_total: int


def load_of(scheduler: Scheduler, paused: bool) -> Load:
    running = scheduler.running
    return Load(
        running=len(running),
        waiting=len(scheduler.waiting),
        tokens=sum(request.length for request in running),
        paused=paused,
        prompt_tokens_total=scheduler.prompt_tokens_total,
        output_tokens_total=scheduler.output_tokens_total,
        cached_tokens_total=scheduler.cached_tokens_total,
    )


class EngineMetrics:
    """Counts what the HTTP side sees and renders it with a Load."""

    def __init__(self, model_name: str, max_total_tokens: int) -> None:
        self._labels = {"model_name": model_name}
        self._max_total_tokens = max_total_tokens
        self._requests = self._aborted = self._retracted = 0
        self._load: Load | None = None
        self._last_total, self._last_at_s, self._throughput = 0, time.perf_counter(), 0.0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._seconds = {
            name: Histogram(
                f"sglang:{name}_seconds",
                text,
                tuple(self._labels),
                registry=self._registry,
                buckets=BUCKETS_S,
            ).labels(**self._labels)
            for name, text in (
                ("e2e_request_latency", "From arrival to the end of a request."),
                ("time_to_first_token", "From arrival to the first token."),
                ("queue_time", "From arrival to the start of prefill."),
                ("inter_token_latency", "Mean time between tokens of a request."),
            )
        }

    def observe(self, request: Request) -> None:
        """Counts an ended request."""
        self._requests += 1
        self._aborted += (request.finish or {}).get("type") == "abort"
        self._retracted += request.retractions > 0
        self._seconds["e2e_request_latency"].observe(request.ended_s - request.arrived_s)
        if request.started_s:
            self._seconds["queue_time"].observe(request.started_s - request.arrived_s)
        if request.first_token_s:
            self._seconds["time_to_first_token"].observe(request.first_token_s - request.arrived_s)
        if len(request.output) > 1:
            decoding_s = request.ended_s - request.first_token_s
            self._seconds["inter_token_latency"].observe(decoding_s / (len(request.output) - 1))

    def render(self, load: Load) -> bytes:
        """The text page."""
        now = time.perf_counter()
        made = load.output_tokens_total - self._last_total
        self._throughput = made / max(now - self._last_at_s, 1e-6)
        self._last_total, self._last_at_s, self._load = load.output_tokens_total, now, load
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client for the values that are not histograms."""
        load = self._load
        if load is None:
            return
        hit_rate = load.cached_tokens_total / max(load.prompt_tokens_total, 1)
        for name, text, value in (
            ("num_running_reqs", "Requests that decode.", load.running),
            ("num_queue_reqs", "Requests that wait.", load.waiting),
            ("num_used_tokens", "Tokens held by running requests.", load.tokens),
            ("max_total_num_tokens", "Tokens that fit at most.", self._max_total_tokens),
            ("token_usage", "Share of the tokens in use.", load.tokens / self._max_total_tokens),
            ("gen_throughput", "Tokens a second since the last scrape.", self._throughput),
            ("cache_hit_rate", "Share of prompt tokens not computed again.", hit_rate),
            ("num_retracted_reqs", "Ended requests that were retracted.", self._retracted),
            ("num_paused_reqs", "Requests held by a pause.", load.running * load.paused),
        ):
            yield self._family(GaugeMetricFamily, name, text, value)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens processed.", load.prompt_tokens_total),
            ("generation_tokens", "Tokens generated.", load.output_tokens_total),
            ("cached_tokens", "Prompt tokens not computed again.", load.cached_tokens_total),
            ("num_requests", "Requests ended.", self._requests),
            ("num_aborted_requests", "Requests aborted.", self._aborted),
        ):
            yield self._family(CounterMetricFamily, name, text, value)

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        family = kind(f"sglang:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
