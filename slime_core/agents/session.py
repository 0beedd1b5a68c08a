"""One agent's session: requests in, tokens kept, rows out."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

from slime_core.agents.answers import Answer, tool_calls
from slime_core.agents.branches import Branch, Place, Point, find_place
from slime_core.agents.errors import CONTEXT_LENGTH, ApiError
from slime_core.agents.requests import ChatRequest, message_key, plain_message
from slime_core.agents.turn_log import RecordedTurn
from slime_core.data.render import encode, render_chat
from slime_core.engines.client import EngineAnswerError
from slime_core.errors import DataError, DeadlineError, PluginError, SlimeError
from slime_core.refs import digest_of
from slime_core.rollout.bridge import bridge, is_end, without_sampled_end
from slime_core.rollout.runtime import Runtime
from slime_core.sample import Sample, Status
from slime_core.seeds import derive_seed
from slime_core.tools.parsers import split_calls

log = logging.getLogger(__name__)
NOT_STORED = ("output_token_logprobs", "input_token_logprobs")


class Session:
    """What one agent says and hears while it works on one sample.

    Attributes:
        key: the bearer key; who has it speaks for this session.
        failure: what went wrong on our side; the attempt at the group then failed.
    """

    def __init__(self, runtime: Runtime, sample: Sample, params: dict[str, Any]) -> None:
        """
        Args:
            sample: what the agent works on; it stays as it is.
            params: SGLang's sampling parameters of the run.
        """
        self.key = f"sk-slime-{secrets.token_urlsafe(24)}"
        self.failure: SlimeError | None = None
        self._runtime = runtime
        self._origin = sample
        self._params = params
        self._branches: list[Branch] = []
        self._begun = 0
        self._turns = 0
        self._last_text = ""
        self._tasks: dict[str, asyncio.Task[Answer]] = {}
        self._all_tasks: set[asyncio.Task[Answer]] = set()
        self._unheard: dict[str, list[asyncio.Task[Answer]]] = {}
        self._closed = False
        name = f"sessions of {sample.describe()}"
        self._ordinal = runtime.notes.get(name, 0)
        runtime.notes[name] = self._ordinal + 1
        self._log = runtime.turn_log(sample, self._ordinal) if runtime.turn_log else None
        self._recorded: list[RecordedTurn] = []
        self._writing = asyncio.Lock()

    async def open(self) -> None:
        """Reads what was recorded before a crash."""
        if self._log is not None:
            self._recorded = await asyncio.to_thread(self._log.earlier)

    async def complete(self, request: ChatRequest, model: str, repeated: bool) -> Answer:
        """One turn. It goes on when the caller stops waiting, until the session is closed.

        Args:
            repeated: the client sends the request again since it got no answer; then it gets the
                answer of the request before.

        Raises:
            ApiError: the turn cannot be.
        """
        return await self.answer_of(self.begin(request, model, repeated))

    def begin(self, request: ChatRequest, model: str, repeated: bool) -> asyncio.Task[Answer]:
        """The turn of a request: a new one, or one whose answer nobody heard.

        Raises:
            ApiError: the session is closed.
        """
        if self._closed:
            raise ApiError(401, "this session is closed", code="invalid_api_key")
        name = request.digest()
        lost = self._unheard.pop(name, [])
        task = lost.pop(0) if lost else self._tasks.get(name) if repeated else None
        if lost:
            self._unheard[name] = lost
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = asyncio.create_task(self._turn(request, model), name="a turn of an agent")
            self._tasks[name] = task
            self._all_tasks.add(task)
        return task

    async def answer_of(self, task: asyncio.Task[Answer]) -> Answer:
        """Waits for a turn, which goes on when the waiting ends.

        Raises:
            ApiError: the turn cannot be.
        """
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ApiError(503, "the session was closed") from None
            raise

    def unheard(self, request: ChatRequest, task: asyncio.Task[Answer]) -> None:
        """The client went away before it had the answer of this turn; if it asks the same again it
        gets that one, since what nobody heard must not be trained beside what was heard."""
        self._unheard.setdefault(request.digest(), []).append(task)

    async def close(self) -> None:
        """Ends what is under way; the key is of no use any more."""
        self._closed = True
        waiting = [task for task in self._all_tasks if not task.done()]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*self._all_tasks, return_exceptions=True)

    @property
    def turns(self) -> int:
        """Answers the model gave."""
        return self._turns

    def rows(self) -> list[Sample]:
        """A row for each branch in which the model said something, in the order they began."""
        found = []
        for branch in self._branches:
            if not branch.turns:
                continue
            row = branch.sample
            row.response = self._last_text
            row.metadata = {
                **self._origin.metadata, "round_number": branch.turns, "branch": branch.number,
            }  # fmt: skip
            row.session_id = f"{row.group_index}-{row.attempt}-{row.index}"
            found.append(row)
        return found

    async def _turn(self, request: ChatRequest, model: str) -> Answer:
        if self._runtime.stopping():
            raise ApiError(503, "the rollout is being stopped")
        limit = int(getattr(self._runtime.args, "max_turns", 1))
        if self._begun >= limit:
            self._cut_short()
            raise ApiError(400, f"this session has had its {limit} turns (max_turns)",
                           code="max_turns")  # fmt: skip
        self._begun += 1
        keys, tools = request.keys(), digest_of(request.tools)
        place = find_place(self._branches, tools, keys)
        branch = self._branch(place, tools)
        branch.busy = True
        try:
            return await self._answer(request, model, branch, place)
        except ApiError:
            raise
        except EngineAnswerError as error:
            raise ApiError(400, error.message, code=CONTEXT_LENGTH) from error
        except (DataError, PluginError) as error:
            raise ApiError(400, str(error), param="messages") from error
        except SlimeError as error:
            self.failure = error
            status = 504 if isinstance(error, DeadlineError) else 500
            raise ApiError(status, str(error)) from error
        finally:
            branch.busy = False

    async def _answer(
        self, request: ChatRequest, model: str, branch: Branch, place: Place
    ) -> Answer:
        sample = Sample.from_dict(branch.sample.to_dict())  # kept only once the turn is whole
        new = request.messages[place.point.messages :]
        put = self._between(request, branch, place, sample, new)
        if place.extends:
            sample.append_response_tokens(tokens=put, log_probs=None, trainable=False)
        else:
            sample.tokens = [*sample.tokens, *put]
        context = len(sample.tokens)
        turn = self._from_log(request, context, put)
        if turn is None:
            pieces = await self._sample(request, branch, sample)
            message, reason = self._message(request, pieces)
            turn = RecordedTurn(request.digest(), context, put, pieces, message, new)
            await self._record(turn)
        else:
            for piece in turn.pieces:
                self._append(sample, piece)
            _, reason = self._message(request, turn.pieces)
        self._keep(branch, sample, request, turn, len(new))
        return self._told(request, model, turn, reason, context)

    def _branch(self, place: Place, tools: str) -> Branch:
        """The branch that a turn goes on with; a new one where it does not extend any."""
        origin = place.branch
        if origin is not None and place.extends:
            return origin
        sample = Sample.from_dict(self._origin.to_dict())
        sample.tokens, sample.response_length, sample.spans = [], 0, []
        sample.loss_mask = sample.rollout_log_probs = None
        sample.rollout_id = sample.index
        branch = Branch(len(self._branches), tools, sample)
        if origin is not None:
            sample.tokens = origin.sample.tokens[: place.point.tokens]
            branch.keys = origin.keys[: place.point.messages]
            branch.points = [p for p in origin.points if p.messages <= place.point.messages]
            engine_of = self._runtime.engine_of
            if last := engine_of.get(self._conversation(origin)):  # it has the beginning cached
                engine_of[self._conversation(branch)] = last
        self._branches.append(branch)
        return branch

    def _conversation(self, branch: Branch) -> str:
        """Names a branch among the conversations of the rollout (Runtime.engine_of)."""
        return f"{self.key}/{branch.number}"

    def _between(
        self,
        request: ChatRequest,
        branch: Branch,
        place: Place,
        sample: Sample,
        new: Sequence[dict[str, Any]],
    ) -> list[int]:
        """Tokens between what is there and the answer."""
        tokenizer, kwargs = self._runtime.tokenizer, self._origin.apply_chat_template_kwargs
        if not branch.points:
            return encode(tokenizer, render_chat(tokenizer, request.messages, tools=request.tools,
                                                 template_kwargs=kwargs))  # fmt: skip
        text = bridge(tokenizer, new, kwargs)
        return encode(tokenizer, without_sampled_end(tokenizer, text, sample.tokens))

    async def _sample(
        self, request: ChatRequest, branch: Branch, sample: Sample
    ) -> list[dict[str, Any]]:
        """Lets the model answer; what a weight update interrupts goes on under the new weights."""
        before, pieces = len(sample.tokens), []
        while True:
            left = self._runtime.sampling.left(sample)
            whole = self._params.get("max_new_tokens")
            if whole is not None:  # over all turns of the row
                left = min(left, whole - sample.response_length)
            if request.max_tokens is not None:
                left = min(left, request.max_tokens - (len(sample.tokens) - before))
            if left < 1 and not pieces:
                self._cut_short(branch)
                raise ApiError(400, "the conversation has reached its length limit "
                               f"({len(sample.tokens)} tokens; rollout_max_response_len, "
                               "rollout_max_context_len)", code=CONTEXT_LENGTH)  # fmt: skip
            body = {
                "input_ids": sample.tokens,
                "return_logprob": True,
                "sampling_params": self._sampling_params(request, branch, sample, left),
            }
            routes = self._runtime.sampling.routes
            if routes is not None:
                body |= routes.fields([sample])
            session = self._conversation(branch)
            result = await self._runtime.generate(body, session=session, whole=False)
            piece = _piece(result)
            if routes is not None:
                piece["meta"] = routes.told(sample, body, piece["meta"])
            self._append(sample, piece)
            pieces.append(piece)
            aborted = sample.status is Status.ABORTED
            if aborted and self._runtime.stopping():
                raise ApiError(503, "the rollout is being stopped")
            if not aborted:
                return pieces

    def _sampling_params(
        self, request: ChatRequest, branch: Branch, sample: Sample, left: int
    ) -> dict[str, Any]:
        own = self._runtime.sampling_params(sample)
        seed = own["sampling_seed"]
        if self._ordinal or branch.number:  # branches of one length are different answers
            seed = derive_seed(seed, "branch", self._ordinal, branch.number)
        stop = [*(self._params.get("stop") or []), *request.stop]
        return {**own, **self._params, "stop": stop or None, "max_new_tokens": max(left, 0),
                "sampling_seed": seed}  # fmt: skip

    def _message(
        self, request: ChatRequest, pieces: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, Any], str]:
        """The assistant's message in an answer, and why it ended."""
        tokenizer = self._runtime.tokenizer
        tokens = [token for piece in pieces for token in piece["tokens"]]
        finish = pieces[-1]["meta"].get("finish_reason") or {}
        reason = "length" if finish.get("type") == "length" else "stop"
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if isinstance(finish.get("matched"), str):
            text = text.removesuffix(finish["matched"])
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if request.tools:
            said = tokens[:-1] if tokens and is_end(tokenizer, tokens[-1]) else tokens
            raw = tokenizer.decode(said, skip_special_tokens=False)
            family = getattr(self._runtime.args, "tool_parser", "auto")
            content, calls = split_calls(raw, family)
            named = [(call.name, call.arguments) for call in calls if call.name]
            readable = [(name, given) for name, given in named if given is not None]
            if readable and len(readable) == len(calls):
                ids = f"call_{len(self._branches)}_{self._turns}"
                message["content"] = content or None
                message["tool_calls"] = tool_calls(readable, ids)
                reason = "tool_calls"
        return message, reason

    def _from_log(self, request: ChatRequest, context: int, put: list[int]) -> RecordedTurn | None:
        """The turn that was recorded for this very request, each once."""
        asked = request.digest()
        for turn in self._recorded:
            if (turn.asked, turn.context, turn.put) == (asked, context, put):
                self._recorded.remove(turn)
                return turn
        return None

    async def _record(self, turn: RecordedTurn) -> None:
        if self._log is None:
            return
        async with self._writing:
            await asyncio.to_thread(self._log.put, turn)

    def _keep(
        self, branch: Branch, sample: Sample, request: ChatRequest, turn: RecordedTurn, new: int
    ) -> None:
        """The turn is whole: it enters its branch."""
        said = message_key(plain_message(turn.message))
        branch.sample = sample
        branch.keys = [*branch.keys, *request.keys()[len(request.messages) - new :], said]
        branch.points.append(Point(len(branch.keys), len(sample.tokens)))
        branch.turns += 1
        self._turns += 1
        self._last_text = turn.message["content"] or ""

    def _told(
        self, request: ChatRequest, model: str, turn: RecordedTurn, reason: str, context: int
    ) -> Answer:
        tokens = [token for piece in turn.pieces for token in piece["tokens"]]
        values = [value for piece in turn.pieces for value in piece["log_probs"]]
        decode = self._runtime.tokenizer.decode
        pairs = zip(tokens, values, strict=True) if request.logprobs else ()
        shown = [(decode([token], skip_special_tokens=False), value) for token, value in pairs]
        return Answer(f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), model, turn.message,
                      reason, context, len(tokens), shown)  # fmt: skip

    def _append(self, sample: Sample, piece: dict[str, Any]) -> None:
        sample.append_response_tokens(
            self._runtime.sampling.routes, tokens=piece["tokens"], log_probs=piece["log_probs"],
            meta_info=piece["meta"],
        )  # fmt: skip

    def _cut_short(self, branch: Branch | None = None) -> None:
        """What the model has said so far stands, but a limit ended it."""
        for one in self._branches if branch is None else [branch]:
            if one.turns:
                one.sample.status = Status.TRUNCATED


def _piece(result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an engine's answer."""
    meta = result["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    return {
        "tokens": [int(pair[1]) for pair in pairs],
        "log_probs": [float(pair[0]) for pair in pairs],
        "meta": {name: value for name, value in meta.items() if name not in NOT_STORED},
    }
