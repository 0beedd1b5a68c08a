"""The gate: closed it lets nothing out, open it hands out the least busy engine."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from slime_core.errors import DeadlineError, EngineError
from slime_core.rollout.gate import EngineGate

SOON_S = 30.0  # for waits that end at once if all is right


class StandInClient:
    def __init__(self, url: str) -> None:
        self.url = url
        self.closed = False
        self.aborts = 0

    async def abort_all(self) -> None:
        self.aborts += 1
        if self.url == "away":
            raise EngineError("nobody there")

    async def close(self) -> None:
        self.closed = True


def run(scenario: Callable[[EngineGate, list[StandInClient]], Awaitable[None]], room: int = 8):
    clients: list[StandInClient] = []

    def connect(url: str) -> Any:
        clients.append(StandInClient(url))
        return clients[-1]

    async def body() -> None:
        await scenario(EngineGate(connect, room), clients)

    asyncio.run(body())


async def settle() -> None:
    """Lets every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_closed_gate_holds_requests_and_opening_lets_them_go():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        await gate.set_engines(["a"])
        entered = asyncio.Event()

        async def request() -> None:
            async with gate.engine(1, SOON_S):
                entered.set()

        task = asyncio.create_task(request())
        await settle()
        assert not entered.is_set()
        await gate.open()
        await asyncio.wait_for(task, SOON_S)
        await gate.close()
        with pytest.raises(DeadlineError, match="gate closed"):
            async with gate.engine(1, 0.01):
                pass

    run(scenario)


def test_the_deadline_says_what_stands_in_the_way():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        with pytest.raises(DeadlineError, match=r"free engine \(gate closed, 0 usable engines\)"):
            async with gate.engine(1, 0.01):
                pass
        await gate.set_engines(["a"])
        await gate.open()
        async with gate.engine(8, SOON_S) as client:
            with pytest.raises(DeadlineError, match=r"gate open, 1 usable engines\)"):
                async with gate.engine(1, 0.01):
                    pass
            await gate.mark_down(client, "it burned")
        with pytest.raises(DeadlineError, match="0 usable engines; a is down: it burned"):
            async with gate.engine(1, 0.01):
                pass

    run(scenario)


def test_the_least_busy_engine_is_taken():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        await gate.set_engines(["a", "b"])
        await gate.open()
        async with gate.engine(4, SOON_S) as first, gate.engine(1, SOON_S) as second:
            assert {first.url, second.url} == {"a", "b"}
            async with gate.engine(2, SOON_S) as third:
                assert third is second, "1 in flight is less than 4"
                async with gate.engine(2, SOON_S) as fourth:
                    assert fourth is second, "3 in flight is less than 4"

    run(scenario)


def test_a_conversation_stays_at_its_engine_while_that_one_is_there_and_has_room():
    async def scenario(gate: EngineGate, _: list[StandInClient]) -> None:
        await gate.set_engines(["a", "b"])
        await gate.open()
        async with gate.engine(2, SOON_S, prefer="b") as first:
            async with gate.engine(1, SOON_S, prefer="b") as again:
                assert (first.url, again.url) == ("b", "b"), "though a is idle"
            async with gate.engine(7, SOON_S, prefer="b") as other:
                assert other.url == "a", "b has no room for so many"
            await gate.mark_down(first, "it failed")
            async with gate.engine(1, SOON_S, prefer="b") as moved:
                assert moved.url == "a"

    run(scenario)


def test_a_full_engine_makes_requests_wait_and_an_idle_one_takes_any_size():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        await gate.set_engines(["a"])
        await gate.open()
        inside, leave = asyncio.Event(), asyncio.Event()

        async def request() -> None:
            async with gate.engine(100, SOON_S):  # more than there is room for
                inside.set()
                await leave.wait()

        first = asyncio.create_task(request())
        await asyncio.wait_for(inside.wait(), SOON_S)
        inside.clear()
        second = asyncio.create_task(request())
        await settle()
        assert not inside.is_set(), "a second one has no room beside the first"
        leave.set()
        await asyncio.wait_for(asyncio.gather(first, second), SOON_S)

    run(scenario)


def test_everybody_who_waits_gets_a_turn_and_the_room_is_never_exceeded():
    """Requests of several sizes, some of which give up while they wait or just when they may go."""

    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        await gate.set_engines(["a", "b"])
        await gate.open()
        used: dict[str, list[int]] = {"a": [], "b": []}
        served, rng = [], random.Random(0)

        async def request(i: int, samples: int, turns: int) -> None:
            async with gate.engine(samples, SOON_S, continues=i % 17 == 0) as client:
                inside = used[client.url]
                inside.append(samples)
                try:
                    assert sum(inside) <= 8 or len(inside) == 1
                    for _ in range(turns):
                        await asyncio.sleep(0)
                finally:
                    inside.remove(samples)
            served.append(i)

        tasks = [
            asyncio.create_task(request(i, rng.choice([1, 1, 1, 4, 9]), rng.randrange(5)))
            for i in range(300)
        ]
        lost = rng.sample(range(300), 100)
        for i in lost:
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            tasks[i].cancel()
        done, late = await asyncio.wait(tasks, timeout=SOON_S)
        assert not late
        for task in done:
            if not task.cancelled():
                task.result()  # what failed is raised here
        assert used == {"a": [], "b": []}
        assert set(served) >= set(range(300)) - set(lost)

    run(scenario)


def test_one_that_gives_up_when_it_may_go_lets_the_next_go():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        await gate.set_engines(["a"])
        await gate.open()
        leave = asyncio.Event()
        entered = []
        loop = asyncio.get_running_loop()

        async def request(name: str, until: asyncio.Event | None = None) -> None:
            async with gate.engine(1, SOON_S):
                entered.append(name)
                if until is not None:
                    await until.wait()
                    # In the next pass but one, when it may go and has not gone yet.
                    loop.call_soon(loop.call_soon, second.cancel)

        first = asyncio.create_task(request("first", leave))
        await settle()
        second, third = (asyncio.create_task(request(name)) for name in ("second", "third"))
        await settle()
        leave.set()
        await asyncio.wait_for(asyncio.gather(first, third), SOON_S)
        assert second.cancelled() and entered == ["first", "third"]
        async with gate.engine(1, SOON_S):
            pass  # no room was lost

    run(scenario, room=1)


def test_what_follows_an_answer_waits_for_the_requests_that_its_room_lets_go():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        await gate.set_engines(["a"])
        await gate.open()
        said: list[str] = []
        answered = asyncio.Event()

        async def request(number: int) -> None:
            async with gate.engine(1, SOON_S):
                said.append("sent")
                await answered.wait()
            said.append("worked up")

        tasks = [asyncio.create_task(request(i)) for i in range(8)]
        await settle()
        assert said == ["sent"] * 4
        answered.set()  # all at once
        await asyncio.wait_for(asyncio.gather(*tasks), SOON_S)
        assert said == ["sent"] * 8 + ["worked up"] * 8

    run(scenario, room=4)


def test_one_that_needs_more_room_than_there_is_holds_up_no_smaller_one():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        await gate.set_engines(["a"])
        await gate.open()
        order: list[str] = []

        async def request(name: str, samples: int, until: asyncio.Event) -> None:
            async with gate.engine(samples, SOON_S):
                order.append(name)
                await until.wait()

        stays, leaves, ends = asyncio.Event(), asyncio.Event(), asyncio.Event()
        ends.set()
        tasks = []
        for name, samples, until in [
            ("stays", 7, stays), ("leaves", 1, leaves), ("large", 4, ends), ("small", 1, ends),
            ("small too", 1, ends),
        ]:  # fmt: skip
            tasks.append(asyncio.create_task(request(name, samples, until)))
            await settle()
        assert order == ["stays", "leaves"]
        leaves.set()
        await asyncio.wait_for(asyncio.gather(tasks[3], tasks[4]), SOON_S)
        assert order == ["stays", "leaves", "small", "small too"], "1 fits beside 7, 4 do not"
        stays.set()
        await asyncio.wait_for(asyncio.gather(*tasks), SOON_S)
        assert order[-1] == "large"

    run(scenario)


def test_the_work_for_a_request_does_not_grow_with_those_that_wait():
    """Also where the room that is left is too small for all of them."""
    looks: list[int] = []

    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        free = gate._free
        await gate.set_engines(["a"])
        await gate.open()

        def counted(*given: Any) -> Any:
            looks[-1] += 1
            return free(*given)

        gate._free = counted  # type: ignore[method-assign]

        async def request() -> None:
            async with gate.engine(3, SOON_S):
                await asyncio.sleep(0)

        for count in (100, 1000):
            looks.append(0)
            await asyncio.gather(*(request() for _ in range(count)))

    run(scenario)
    assert looks[1] < 12 * looks[0], "ten times the requests"


def test_continuations_go_before_new_requests():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        order: list[str] = []
        await gate.set_engines(["a"])

        async def request(name: str, continues: bool) -> None:
            async with gate.engine(8, SOON_S, continues=continues):
                order.append(name)
                await settle()

        names = [("new 1", False), ("new 2", False), ("old 1", True), ("old 2", True)]
        tasks = []
        for name, continues in names:
            tasks.append(asyncio.create_task(request(name, continues)))
            await settle()
        await gate.open()
        await asyncio.wait_for(asyncio.gather(*tasks), SOON_S)
        assert order[:2] == ["old 1", "old 2"] and set(order[2:]) == {"new 1", "new 2"}

    run(scenario)


def test_a_marked_engine_is_left_alone_until_the_engines_are_set_again():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        await gate.set_engines(["a", "b"])
        await gate.open()
        async with gate.engine(1, SOON_S) as client:
            await gate.mark_down(client, "refused")
            other = "b" if client.url == "a" else "a"
            assert gate.down == {client.url: "refused"}
            for _ in range(3):
                async with gate.engine(1, SOON_S) as next_one:
                    assert next_one.url == other
        await gate.set_engines(["a", "b"])
        assert gate.down == {}
        async with gate.engine(1, SOON_S), gate.engine(1, SOON_S):
            pass  # both are used again

    run(scenario)


def test_a_request_that_left_before_a_repair_does_not_blame_the_repaired_engine():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        await gate.set_engines(["a"])
        await gate.open()
        async with gate.engine(1, SOON_S) as before:
            await gate.set_engines([])
            await gate.set_engines(["a"])
            await gate.mark_down(before, "late news")
            async with gate.engine(1, SOON_S) as after:
                assert after is not before
        assert gate.down == {}

    run(scenario)


def test_counts_stay_right_when_an_engine_is_replaced_under_a_request():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        await gate.set_engines(["a"])
        await gate.open()
        async with gate.engine(8, SOON_S):
            await gate.set_engines([])
            await gate.set_engines(["a"])
        async with gate.engine(8, SOON_S):  # full again
            with pytest.raises(DeadlineError):
                async with gate.engine(8, 0.01):
                    pass

    run(scenario)


def test_a_client_is_closed_when_its_last_request_has_ended():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        await gate.set_engines(["a", "b"])
        await gate.open()
        async with gate.engine(1, SOON_S) as client:
            await gate.set_engines([])
            idle = next(one for one in clients if one is not client)
            assert idle.closed and not client.closed  # type: ignore[attr-defined]
        assert all(one.closed for one in clients)

    run(scenario)


def test_closing_the_gate_closes_every_client():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        await gate.set_engines(["a", "b"])
        await gate.aclose()
        assert [one.closed for one in clients] == [True, True]

    run(scenario)


def test_an_abort_reaches_every_engine_and_one_that_fails_is_marked_down():
    async def scenario(gate: EngineGate, clients: list[StandInClient]) -> None:
        await gate.set_engines(["away", "a", "b"])
        await gate.abort_all()
        assert [client.aborts for client in clients] == [1, 1, 1]
        assert gate.down == {"away": "it did not abort: nobody there"}

    run(scenario)
