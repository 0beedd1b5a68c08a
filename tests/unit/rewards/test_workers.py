import asyncio
import os
import sys
import textwrap
import time

import psutil
import pytest

from slime_core.errors import RewardError
from slime_core.rewards.workers import GraderPool, PoolSettings

# Seconds that only this test session's sleepers sleep, so that they can be told from others.
SLEEP_S = str(100_000 + os.getpid())
HOSTILE = """
import ctypes, os, signal, sys, threading, time, subprocess

def good(args, sample):
    return float(len(sample.response))

def naps(args, sample):
    open(sample.label, "w").close()
    time.sleep(0.1)
    return float(len(sample.response))

def hang(args, sample):
    while True:
        try:
            time.sleep(60)
        except Exception:
            pass

def hang_deaf(args, sample):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True:
        time.sleep(60)

def big_power(args, sample):
    return 10 ** (10 ** 9) > 1

def leave(args, sample):
    sys.exit(0)

def leave_at_once(args, sample):
    os._exit(0)

def kill_self(args, sample):
    os.kill(os.getpid(), signal.SIGKILL)

def segfault(args, sample):
    ctypes.string_at(0)

def raises(args, sample):
    raise ValueError("odd answer")

def interrupt(args, sample):
    raise KeyboardInterrupt

def memory(args, sample):
    return len(bytearray(1 << 40))

def recursion(args, sample):
    return recursion(args, sample)

def prints(args, sample):
    print('{"value": 77.0}', flush=True)
    os.write(1, b"noise without a newline")
    return 1.0

def reads_input(args, sample):
    return float(len(sys.stdin.read()))

def closes_everything(args, sample):
    os.closerange(0, 256)
    return 1.0

def forks_on(args, sample):
    os.fork()
    return 1.0

def leaves_children(args, sample):
    for detached in (False, True):
        subprocess.Popen(["sleep", "SLEEP_S"], start_new_session=detached)
    return 1.0

def leaves_children_and_dies(args, sample):
    leaves_children(args, sample)
    os._exit(3)

def leaves_children_and_hangs(args, sample):
    leaves_children(args, sample)
    hang_deaf(args, sample)

def object_value(args, sample):
    return object()

def nothing(args, sample):
    return None

def not_a_number(args, sample):
    return float("nan")
"""


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "hostile.py"
    path.write_text(HOSTILE.replace("SLEEP_S", SLEEP_S))
    return str(path)


def grade(plugin, names, timeout_s=0.5, **settings):
    """Grades one response of three letters by each function, in turn, in one pool."""
    options = {"workers": 1, "grace_s": 0.5, "memory_bytes": 2 << 30} | settings

    async def run():
        pool = GraderPool(PoolSettings(**options))
        try:
            calls = [
                pool.grade(f"custom:{plugin}:{name}", [{"response": "abc"}], timeout_s)
                for name in names
            ]
            return await asyncio.gather(*calls), pool.restarts
        finally:
            await pool.close()

    return asyncio.run(run())


def stray_processes():
    """Sleepers that a hostile grader has left running."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] == ["sleep", SLEEP_S]:
            found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hang", "timeout"),
        ("hang_deaf", "timeout"),
        ("big_power", "timeout"),
        ("leave", "exception"),
        ("leave_at_once", "crash"),
        ("kill_self", "crash"),
        ("segfault", "crash"),
        ("raises", "exception"),
        ("interrupt", "exception"),
        ("memory", "memory"),
        ("recursion", "exception"),
        ("closes_everything", "crash"),
        ("leaves_children_and_dies", "crash"),
        ("leaves_children_and_hangs", "timeout"),
        ("missing", "exception"),
    ],
)
def test_a_hostile_grader_costs_its_own_sample_only(name, reason, plugin):
    (bad, good), _ = grade(plugin, [name, "good"])
    assert bad.reason == reason, bad
    assert bad.message
    assert good.value == 3.0
    assert stray_processes() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("prints", 1.0), ("reads_input", 0.0), ("forks_on", 1.0), ("leaves_children", 1.0)],
)
def test_odd_habits_do_not_disturb_the_answer(name, value, plugin):
    answers, restarts = grade(plugin, [name, "good"])
    assert [answer.value for answer in answers] == [value, 3.0]
    assert restarts == 0
    assert stray_processes() == []


def test_values_that_are_no_numbers_come_back_as_they_are(plugin):
    (odd, none, nan), _ = grade(plugin, ["object_value", "nothing", "not_a_number"])
    assert "object object" in odd.value["__repr__"]
    assert none.value is None and none.reason is None
    assert nan.value != nan.value


def test_an_item_in_the_middle_of_a_batch_fails_alone(tmp_path):
    path = tmp_path / "mixed.py"
    path.write_text(
        textwrap.dedent("""
        import os, time
        def f(args, sample):
            if sample.response == "die":
                os._exit(1)
            if sample.response == "hang":
                time.sleep(60)
            return float(sample.response)
        """)
    )

    async def run():
        pool = GraderPool(PoolSettings(workers=1, grace_s=0.5))
        words = ["0", "1", "die", "3", "hang", "5", "6"]
        try:
            return await asyncio.gather(
                *(pool.grade(f"custom:{path}:f", [{"response": word}], 0.5) for word in words)
            )
        finally:
            await pool.close()

    answers = asyncio.run(run())
    assert [answer.reason or answer.value for answer in answers] == [
        0.0,
        1.0,
        "crash",
        3.0,
        "timeout",
        5.0,
        6.0,
    ]


def test_a_hanging_worker_does_not_hold_up_the_other(plugin):
    async def run():
        pool = GraderPool(PoolSettings(workers=2))
        hanging = asyncio.create_task(
            pool.grade(f"custom:{plugin}:hang", [{"response": "abc"}], 60.0)
        )
        try:
            answers = [
                await pool.grade(f"custom:{plugin}:good", [{"response": "x" * n}], 60.0)
                for n in range(5)
            ]
            assert not hanging.done()
            return [answer.value for answer in answers]
        finally:
            await pool.close()
            assert (await hanging).reason == "crash"

    assert asyncio.run(run()) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_busy_event_loop_is_not_taken_for_a_slow_grader(plugin, tmp_path):
    begun = tmp_path / "begun"

    async def run():
        pool = GraderPool(PoolSettings(workers=1, grace_s=0.1))
        item = [{"response": "ab", "label": str(begun)}]
        try:
            call = asyncio.create_task(pool.grade(f"custom:{plugin}:naps", item, 0.2))
            while not begun.exists():
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            time.sleep(0.6)  # Somebody blocks the loop for longer than the deadline.
            return await call
        finally:
            await pool.close()

    assert asyncio.run(run()).value == 2.0


def test_close_leaves_no_process_and_refuses_more(plugin):
    async def run():
        pool = GraderPool(PoolSettings(workers=2))
        await asyncio.gather(
            *(pool.grade(f"custom:{plugin}:good", [{"response": ""}], 5.0) for _ in range(8))
        )
        # The test process may have other children, from tests before this one.
        children = psutil.Process().children(recursive=True)
        workers = [child for child in children if "worker_main" in " ".join(child.cmdline())]
        assert workers
        await pool.close()
        assert not any(worker.is_running() for worker in workers)
        with pytest.raises(RewardError, match="closed"):
            await pool.grade("grader:exact_match", ["a", "a", {}], 1.0)

    asyncio.run(run())


def test_workers_die_with_a_parent_that_is_killed(plugin):
    script = textwrap.dedent(f"""
        import asyncio, psutil
        from slime_core.rewards.workers import GraderPool

        async def run():
            pool = GraderPool()
            await pool.grade("custom:{plugin}:good", [{{"response": ""}}], 5.0)
            call = pool.grade("custom:{plugin}:hang_deaf", [{{"response": ""}}], 600.0)
            task = asyncio.create_task(call)
            await asyncio.sleep(0)
            print(psutil.Process().children()[0].pid, flush=True)
            await task

        asyncio.run(run())
    """)
    parent = psutil.Popen(
        [sys.executable, "-c", script],
        stdout=-1,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        worker = psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.wait(10)
    assert not psutil.wait_procs([worker], timeout=10)[1]


def test_an_item_that_json_cannot_carry_is_typed():
    async def run():
        pool = GraderPool()
        loop: dict = {}
        loop["self"] = loop
        try:
            return await pool.grade("grader:exact_match", ["a", "a", loop], 1.0)
        finally:
            await pool.close()

    assert asyncio.run(run()).reason == "exception"
