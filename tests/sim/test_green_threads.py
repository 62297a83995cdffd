"""Threads of simulated processes wait in virtual time, and end where they wait when the process is killed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from swarm.core.errors import DeadlineExceeded
from swarm.testing.green_threads import GreenNetwork
from swarm.testing.virtual_loop import run_virtual


def on_thread(function: Callable[[GreenNetwork], None]) -> float:
    """Run `function` on a green thread and return how many virtual seconds it took."""

    async def scenario() -> float:
        network = GreenNetwork()
        await network.run_thread(lambda: function(network))
        return asyncio.get_running_loop().time()

    return run_virtual(scenario())


def test_a_pause_takes_virtual_time_only() -> None:
    assert on_thread(lambda network: network.waits.event().wait(3600.0) and None) == 3600.0


def test_an_event_wakes_its_waiters_before_the_timeout() -> None:
    found: list[bool] = []

    def wait(network: GreenNetwork) -> None:
        event = network.waits.event()
        network.loop.call_later(2.0, event.set)
        found.extend((event.wait(1.0), event.wait(5.0), event.wait(5.0)))

    assert on_thread(wait) == 2.0
    assert found == [False, True, True]


def test_a_condition_is_checked_again_after_each_notification() -> None:
    found: list[bool] = []

    def wait(network: GreenNetwork) -> None:
        condition, numbers = network.waits.condition(threading.Lock()), list[int]()

        def grow() -> None:
            with condition:
                numbers.append(1)
                condition.notify_all()

        for at_s in (1.0, 2.0, 3.0):
            network.loop.call_later(at_s, grow)
        with condition:
            found.append(condition.wait_for(lambda: len(numbers) == 2, 10.0))
            found.append(condition.wait_for(lambda: len(numbers) == 4, 10.0))

    assert on_thread(wait) == 12.0
    assert found == [True, False]


def test_a_call_ends_by_its_deadline_and_its_coroutine_is_cancelled() -> None:
    cancelled: list[bool] = []

    async def endless() -> None:
        try:
            await asyncio.sleep(100.0)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    def call(network: GreenNetwork) -> None:
        assert network.run(asyncio.sleep(1.0, "done"), 2.0) == "done"
        with pytest.raises(DeadlineExceeded):
            network.run(endless(), 2.0)
        network.waits.event().wait(0.1)

    assert on_thread(call) == pytest.approx(3.1)
    assert cancelled == [True]


def test_threads_of_a_killed_process_end_where_they_wait() -> None:
    ended: list[str] = []

    async def scenario() -> None:
        network = GreenNetwork()

        def train() -> None:
            try:
                network.waits.event().wait()
            finally:
                ended.append("cleaned up")
                network.waits.event().wait(10.0)
                ended.append("unreachable")

        async with asyncio.TaskGroup() as group:
            group.create_task(network.run_thread(train))
            await asyncio.sleep(1.0)
            network.kill()

    run_virtual(scenario())
    assert ended == ["cleaned up"]


def test_an_exception_of_a_thread_reaches_whoever_awaits_it() -> None:
    def fail(network: GreenNetwork) -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        on_thread(fail)
