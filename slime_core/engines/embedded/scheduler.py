"""Continuous batching: waves of prefill between the decode steps of all running requests."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from slime_core.engines.embedded.kv import KVPool, LayerKV, width_class
from slime_core.engines.embedded.model import ServedModel
from slime_core.engines.embedded.request import Request
from slime_core.engines.embedded.sampler import Draw, alternatives, draw
from slime_core.engines.embedded.stopping import StopRules

log = logging.getLogger(__name__)
DETERMINISTIC_ROWS = 8
"""On CPU and one thread a matrix product of 1 to 3 rows rounds differently from larger ones."""
SMALLEST_PREFILL = 8
LOGITS_BUDGET = 1 << 24
"""Logits held at once while prompts are scored."""


@dataclass(frozen=True)
class Limits:
    """What bounds a step.

    Attributes:
        running: requests that decode together.
        prefill_tokens: padded tokens of one prefill wave.
        deterministic: shapes depend on a request's own length only, and never have few rows.
    """

    running: int = 256
    prefill_tokens: int = 1024
    deterministic: bool = False


class Scheduler:
    """Owns the waiting queue and the running rows. Used by one thread only.

    A step is at most one prefill wave and one decode of every pool. Requests that share a prompt
    share its prefill. In deterministic mode rows live in pools by the width class of their own
    length; otherwise in one pool as wide as the longest needs.

    Attributes:
        weight_version: given to requests when they get a token or end.
        step_pause_s: slept after each step (SGLang's /slow_down, for tests of what is in flight).
    """

    def __init__(self, model: ServedModel, stops: StopRules, limits: Limits) -> None:
        self.model = model
        self.stops = stops
        self.limits = limits
        self.weight_version = ""
        self.step_pause_s = 0.0
        self.waiting: deque[Request] = deque()
        self.prompt_tokens_total = 0
        self.output_tokens_total = 0
        self.cached_tokens_total = 0
        self._pools: dict[int, KVPool] = {}
        self._just_ended = False
        self._min_rows = DETERMINISTIC_ROWS if limits.deterministic else 1

    # -- what the engine thread calls between steps

    @property
    def running(self) -> list[Request]:
        return [request for pool in self._pools.values() for request in pool.requests]

    @property
    def idle(self) -> bool:
        """Nothing waits or runs, and nothing ended by itself in the last step.

        So it is in SGLang, which drops the batch of one step at the next: right after an answer
        it is not idle and refuses a flush.
        """
        running = any(pool.requests for pool in self._pools.values())
        return not (self.waiting or running or self._just_ended)

    def submit(self, requests: Iterable[Request]) -> None:
        self.waiting.extend(requests)

    @torch.inference_mode()
    def abort(self, hit: Callable[[Request], bool]) -> list[Request]:
        """Ends the requests for which `hit` is true; returns them."""
        ended = [request for request in self.waiting if hit(request)]
        for request in ended:
            self._end(request, abort="Abort in waiting queue")
        self.waiting = deque(request for request in self.waiting if request.finish is None)
        for pool in self._pools.values():
            hits = {i for i, request in enumerate(pool.requests) if hit(request)}
            for index in hits:
                self._end(pool.requests[index], abort="Aborted")
                ended.append(pool.requests[index])
            pool.remove(hits)
        return ended

    def retract(self) -> None:
        """Sends all running requests back to the queue without their keys and values."""
        for request in reversed(self.running):
            request.retractions += 1
            self.waiting.appendleft(request)
        self._pools.clear()

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Advances every running request by one token; returns those that got one or ended."""
        self._just_ended = False
        touched: dict[int, Request] = {}
        if self.waiting:
            touched.update((id(request), request) for request in self._prefill_wave())
        for pool in list(self._pools.values()):
            if pool.requests:
                touched.update((id(request), request) for request in self._decode(pool))
        if self.limits.deterministic:
            self._rehouse()
        self._pools = {key: pool for key, pool in self._pools.items() if pool.requests}
        self._just_ended = any(request.finish is not None for request in touched.values())
        return list(touched.values())

    # -- prefill

    def _prefill_wave(self) -> list[Request]:
        wave, prompts = self._take_wave()
        if not wave:
            return []
        longest = max(len(prompt) for prompt in prompts)
        deterministic = self.limits.deterministic
        width = width_class(longest, SMALLEST_PREFILL) if deterministic else longest
        spare = max(0, self._min_rows - len(prompts))
        hidden, layers = self.model.prefill(prompts + prompts[:1] * spare, width)
        routed = self.model.routed(max(len(prompts), self._min_rows), width)
        row_of = {tuple(prompt): row for row, prompt in enumerate(prompts)}
        rows = [row_of[tuple(request.tokens)] for request in wave]
        for request, row in zip(wave, rows, strict=True):
            if request.routes_from is not None and routed is not None:
                request.routes = [routed[row, : len(prompts[row])]]
        last = torch.tensor([len(prompts[row]) - 1 for row in rows], device=hidden.device)
        index = torch.tensor(rows, device=hidden.device)
        self._score_prompts(wave, rows, hidden)
        newest = self.model.logits(_at_least(hidden[index, last], self._min_rows))
        self._take_tokens(wave, draw(newest[: len(wave)], wave, self.stops.end_ids))
        going = [i for i, request in enumerate(wave) if request.finish is None]
        if going:
            chosen = index[going]
            self._house(
                [wave[i] for i in going],
                [(keys[chosen], values[chosen]) for keys, values in layers],
            )
        return wave

    def _take_wave(self) -> tuple[list[Request], list[list[int]]]:
        """Takes waiting requests of one width class, oldest first, and their distinct prompts."""
        room = self.limits.running - len(self.running)
        if room <= 0:
            return [], []
        head = width_class(self.waiting[0].length, SMALLEST_PREFILL)
        most = max(1, self.limits.prefill_tokens // head)
        wave: list[Request] = []
        left: deque[Request] = deque()
        prompts: dict[tuple[int, ...], list[int]] = {}
        now = time.perf_counter()
        while self.waiting:
            request = self.waiting.popleft()
            fits = len(wave) < room and width_class(request.length, SMALLEST_PREFILL) == head
            key = tuple(request.tokens) if fits else ()
            if not fits or (key not in prompts and len(prompts) >= most):
                left.append(request)
                continue
            if key in prompts:
                request.cached_tokens = len(key) - 1
            else:
                prompts[key] = request.tokens
            request.started_s = request.started_s or now
            wave.append(request)
        self.waiting = left
        self.prompt_tokens_total += sum(len(r.prompt) for r in wave if not r.retractions)
        self.cached_tokens_total += sum(request.cached_tokens for request in wave)
        return wave, list(prompts.values())

    def _score_prompts(
        self, wave: Sequence[Request], rows: Sequence[int], hidden: torch.Tensor
    ) -> None:
        """Fills in the prompts' own log-probs (temperature 1) where they were asked for."""
        for request, row in zip(wave, rows, strict=True):
            if not request.scores_prompt:
                continue
            request.input_log_probs = []
            first, last = request.ask.start, len(request.prompt) - 1
            block = max(DETERMINISTIC_ROWS, LOGITS_BUDGET // self.model.vocab_size)
            for at in range(first, last, block):
                end = min(at + block, last)
                logits = self.model.logits(_at_least(hidden[row, at:end], self._min_rows))
                full = torch.log_softmax(logits[: end - at], dim=-1)
                targets = torch.tensor(request.prompt[at + 1 : end + 1], device=full.device)
                scores = full.gather(-1, targets[:, None])[:, 0]
                request.input_log_probs.extend(scores.tolist())
                tops, chosen = alternatives(full, request.ask)
                request.input_top.extend(tops)
                request.input_ids_logprobs.extend(chosen)

    # -- decode

    def _decode(self, pool: KVPool) -> list[Request]:
        width = pool.width
        if not self.limits.deterministic:
            width = width_class(max(request.length for request in pool.requests))
            if width > pool.width:
                pool.widen(width)
        logits = self.model.logits(self.model.decode(pool, width))
        requests = list(pool.requests)
        routed = self.model.routed(pool.rows, 1)
        for row, request in enumerate(requests):
            if request.routes_from is not None and routed is not None:
                request.routes.append(routed[row])
        self._take_tokens(requests, draw(logits[: len(requests)], requests, self.stops.end_ids))
        pool.remove({i for i, request in enumerate(requests) if request.finish is not None})
        return requests

    def _house(self, requests: list[Request], layers: list[LayerKV]) -> None:
        """Gives requests with computed positions a row in the right pool."""
        if not self.limits.deterministic:
            width = width_class(max(request.length for request in requests))
            pool = self._pools.setdefault(0, KVPool(width, self._min_rows))
            if width > pool.width:
                pool.widen(width)
            pool.append(requests, layers)
            return
        by_width: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            by_width.setdefault(width_class(request.length), []).append(index)
        for width, indices in by_width.items():
            pool = self._pools.setdefault(width, KVPool(width, self._min_rows))
            part = [(keys[indices], values[indices]) for keys, values in layers]
            pool.append([requests[i] for i in indices], part)

    def _rehouse(self) -> None:
        """Moves rows that outgrew their pool to the next wider one."""
        for pool in list(self._pools.values()):
            out = [i for i, r in enumerate(pool.requests) if width_class(r.length) > pool.width]
            if out:
                movers, layers = [pool.requests[i] for i in out], pool.rows_of(out)
                pool.remove(set(out))
                self._house(movers, layers)

    # -- ends

    def _take_tokens(self, requests: Sequence[Request], new: Draw) -> None:
        now = time.perf_counter()
        for row, request in enumerate(requests):
            if request.limit == 0:
                self._end(request, {"type": "length", "length": 0})
                continue
            log_prob = new.log_probs[row]
            if math.isnan(log_prob):
                self._end(request, abort="the model's logits are not finite", status=500)
                continue
            request.output.append(new.tokens[row])
            request.log_probs.append(log_prob)
            request.first_token_s = request.first_token_s or now
            request.weight_version = self.weight_version
            if request.ask.top or request.ask.token_ids:
                tops, chosen = alternatives(new.full[row : row + 1], request.ask)
                request.output_top.extend(tops)
                request.output_ids_logprobs.extend(chosen)
            finish = self.stops.check(request)
            if finish is not None:
                self._end(request, finish)
        self.output_tokens_total += len(requests)

    def _end(
        self,
        request: Request,
        finish: dict | None = None,
        abort: str = "",
        status: int | None = None,
    ) -> None:
        request.finish = finish
        if finish is None:
            request.abort(abort, status)
        request.weight_version = self.weight_version
        request.ended_s = time.perf_counter()


def _at_least(hidden: torch.Tensor, rows: int) -> torch.Tensor:
    """Repeats the first row until there are `rows`; [n, hidden] -> [max(n, rows), hidden]."""
    spare = rows - hidden.shape[0]
    return torch.cat([hidden, hidden[:1].expand(spare, -1)]) if spare > 0 else hidden
