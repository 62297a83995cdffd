"""A task that waits for a change misses none, and stops waiting when its time is over."""

from __future__ import annotations

import asyncio

from swarm.core.notify import ChangeEvent, wait_until_set
from swarm.testing.virtual_loop import run_virtual


def test_a_change_before_the_wait_is_returned_once() -> None:
    async def main() -> list[bool]:
        event = ChangeEvent()
        event.notify()
        event.notify()
        return [await event.wait(1.0), await event.wait(1.0)]

    assert run_virtual(main()) == [True, False]


def test_a_wait_without_limit_ends_with_the_change() -> None:
    async def main() -> float:
        event, loop = ChangeEvent(), asyncio.get_running_loop()
        begun_s = loop.time()
        loop.call_later(7.0, event.notify)
        assert await event.wait()
        return loop.time() - begun_s

    assert run_virtual(main()) == 7.0


def test_all_tasks_that_wait_are_woken_by_one_change() -> None:
    async def main() -> list[bool]:
        event = ChangeEvent()
        asyncio.get_running_loop().call_later(1.0, event.notify)
        return list(await asyncio.gather(event.wait(5.0), event.wait(5.0)))

    assert run_virtual(main()) == [True, True]


def test_a_cleared_change_is_not_returned() -> None:
    async def main() -> bool:
        event = ChangeEvent()
        event.notify()
        event.clear()
        return await event.wait(1.0)

    assert run_virtual(main()) is False


def test_waiting_for_an_event_says_whether_it_was_set_in_time() -> None:
    async def main() -> list[bool]:
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.call_later(2.0, event.set)
        return [await wait_until_set(event, 1.0), await wait_until_set(event, 5.0)]

    assert run_virtual(main()) == [False, True]
