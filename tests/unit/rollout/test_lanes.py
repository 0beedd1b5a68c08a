"""Answers free their room first and are worked up after, one of them a pass of the loop."""

import asyncio
import itertools

from slime_core.rollout import lanes as lanes_module
from slime_core.rollout.lanes import Lanes


async def told(order: list[str], lanes: Lanes, answers: int) -> None:
    async def one() -> None:
        await lanes.to_leave()
        order.append("left")
        await lanes.to_work_up()
        order.append("worked up")

    await asyncio.gather(*(one() for _ in range(answers)))


def order_of(answers: int) -> list[str]:
    order: list[str] = []

    async def body() -> None:
        await told(order, Lanes(), answers)

    asyncio.run(body())
    return order


def test_all_leave_before_one_is_worked_up():
    assert order_of(8) == ["left"] * 8 + ["worked up"] * 8


def test_one_that_waits_to_be_worked_up_lets_some_go_first_and_not_all(monkeypatch):
    monkeypatch.setattr(lanes_module, "MOST_AHEAD", 3)
    order = order_of(10)
    assert order[:5] == ["left"] * 4 + ["worked up"], "nobody waited when the first one left"
    assert order[5:9] == ["left"] * 3 + ["worked up"] and len(order) == 20


def test_one_goes_on_in_each_pass_of_the_loop():
    async def body() -> None:
        order: list[str] = []
        work = asyncio.create_task(told(order, Lanes(), 5))
        seen = [0]
        while not work.done():
            await asyncio.sleep(0)
            seen.append(len(order))
        assert max(later - before for before, later in itertools.pairwise(seen)) == 1
        assert len(order) == 10

    asyncio.run(body())


def test_one_that_nobody_waits_for_takes_no_turn_and_stops_no_other():
    async def body() -> None:
        lanes = Lanes()
        gone, other = (asyncio.create_task(lanes.to_leave()) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait_for(other, 5)
        assert gone.cancelled()
        for _ in range(5):
            await asyncio.sleep(0)
        await asyncio.wait_for(lanes.to_work_up(), 5)  # it had nobody left, and goes on

    asyncio.run(body())
