"""Agents as generate functions: `--agent-path my.py:agent`, or `open_session` in one of your own.

An agent is `async def agent(base_url, api_key, sample)`, or a plain function, which gets a thread
of its own. It works with any client of OpenAI's protocol, may start programs, and returns the
reward, or None for the configured grader.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from slime_core.agents.session import Session
from slime_core.errors import PluginError
from slime_core.plugins.load import check_signature, is_async, load
from slime_core.plugins.threads import in_thread
from slime_core.plugins.user_code import raised
from slime_core.rewards.aside import TimeoutAside
from slime_core.rewards.result import FAILED_BEFORE, ScoreFailure, to_result
from slime_core.rollout.runtime import Runtime, current
from slime_core.sample import Sample, Status
from slime_core.waits import place

log = logging.getLogger(__name__)
AGENT_NAMES = ("agent", "run_agent")
CALL = ("base_url", "api_key", "sample")
NO_PLACE = (
    "a place among the open sessions: raise agent_concurrency, or close a session before you open "
    "the next"
)


@dataclass
class OpenSession:
    """What an agent needs to know, and its rows once it is done.

    Attributes:
        base_url: of OpenAI's protocol, `/v1` included. `url_with_key` does without a key.
        api_key: the session's own.
    """

    base_url: str
    api_key: str
    session: Session

    @property
    def url_with_key(self) -> str:
        """A base URL for clients that send no key, or always the same."""
        return f"{self.base_url.removesuffix('/v1')}/{self.api_key}/v1"

    def rows(self, reward: float | dict[str, Any] | None = None) -> list[Sample]:
        """The rows of the session, each with the reward; [] where the model was never asked."""
        rows = self.session.rows()
        for row in rows:
            row.reward = reward
        return rows


@asynccontextmanager
async def open_session(
    sample: Sample, sampling_params: dict[str, Any] | None = None
) -> AsyncIterator[OpenSession]:
    """A session for one sample, closed at the end of the block.

    Raises:
        PluginError: outside of a rollout.
        SlimeError: what the engines or the store raised while the session was open, whatever the
            agent made of it.
    """
    runtime = current()
    if runtime.gateway is None:
        raise PluginError("agents have no gateway here: it belongs to a rollout worker")
    if runtime.home not in (None, asyncio.get_running_loop()):
        raise PluginError("a session must be opened on the event loop that called the function")
    gateway = runtime.gateway
    async with place(gateway.slots, NO_PLACE, runtime.args.stage_timeout_s):
        session = Session(runtime, sample, sampling_params or {})
        await session.open()
        base_url = await gateway.admit(session)
        try:
            yield OpenSession(base_url, session.key, session)
        finally:
            gateway.dismiss(session)
            await session.close()
    if session.failure is not None and not runtime.stopping():
        raise session.failure


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Lets the agent of `agent_path` work on a sample; each branch of its session is a row."""
    runtime = current()
    agent = load_agent(args.agent_path)
    async with open_session(sample, sampling_params) as opened:
        reward, reason, message = await _worked(args, agent, opened, sample, evaluation)
    if runtime.stopping():
        sample.status = Status.ABORTED
        return sample
    if reason is None and not opened.session.turns:
        reason, message = "agent_silent", "the agent never asked the model"
    rows = opened.rows(None if reason else reward)
    rows = rows or [_empty(runtime, sample)]
    if reason is not None:
        for row in rows:
            row.metadata = {**row.metadata, FAILED_BEFORE: {"reason": reason, "message": message}}
    return rows if len(rows) > 1 else rows[0]


def load_agent(path: str | None) -> Callable[..., Any]:
    """The agent at an import path.

    Raises:
        PluginError: there is none, or it cannot be called as agents are.
    """
    if not path:
        raise PluginError("no agent is named: set agent_path")
    agent = load(path, AGENT_NAMES)
    check_signature(agent, path, CALL)
    return agent


async def _worked(
    args: Any, agent: Callable[..., Any], opened: OpenSession, sample: Sample, evaluation: bool
) -> tuple[Any, str | None, str]:
    """(reward, why it failed or None, what happened)."""
    limit_s, gateway = args.agent_timeout_s, current().gateway
    assert gateway is not None  # a session is open
    try:
        call = partial(agent, opened.base_url, opened.api_key, sample)
        work = call if is_async(agent) else partial(in_thread, args.agent_path, call)
        reward = await gateway.aside.run(work, limit_s)
    except TimeoutAside:
        return None, "agent_timeout", f"{args.agent_path} took more than {limit_s:g} s"
    except Exception as error:  # whatever an agent raises is its sample's failure, by name
        message = f"{args.agent_path} raised {raised(error)}"
        trace = "".join(traceback.format_tb(error.__traceback__)).rstrip()
        if gateway.first_time(trace):
            log.warning("%s: %s\n%s", sample.describe(), message, trace)
        return None, "agent_error", message
    if reward is None:
        return None, None, ""
    key = args.eval_reward_key or args.reward_key if evaluation else args.reward_key
    key = key if isinstance(reward, dict) or not evaluation else None
    result = to_result(reward, "", key, args.agent_path)
    if isinstance(result, ScoreFailure):
        return None, result.reason, result.message
    return result.value, None, ""


def _empty(runtime: Runtime, sample: Sample) -> Sample:
    """A row without an answer, which nothing trains."""
    sample.tokens = list(sample.tokens)
    sample.status = Status.FAILED
    sample.response = ""
    return sample
