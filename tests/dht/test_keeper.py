"""A keeper of records renews them at its interval, backs off after failures, and stores changes soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm.core.errors import NetworkError
from swarm.dht.keeper import RecordKeeper
from swarm.testing.virtual_loop import run_virtual


def times_of_stores(
    works: Callable[[int], bool],
    *,
    until_s: float,
    changes_at_s: tuple[float, ...] = (),
    renew_s: float | Callable[[], float] = 10.0,
    gap_s: float | None = None,
) -> list[float]:
    """Return when a keeper that retries after 1 s stores its records, in seconds. `works`: whether the store
    of this number succeeds.
    """
    times: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()

        async def store() -> bool:
            times.append(loop.time() - begun_s)
            if not works(len(times)):
                raise NetworkError("no peer answers")
            return True

        keeper = RecordKeeper(store, "the test's records", renew_s=renew_s, retry_s=1.0, gap_s=gap_s)
        for at_s in changes_at_s:
            loop.call_later(at_s, keeper.renew_soon)
        try:
            async with asyncio.timeout(until_s):
                await keeper.run()
        except TimeoutError:
            assert keeper.attempted.is_set()

    run_virtual(main())
    return [round(at_s, 3) for at_s in times]


def test_records_are_renewed_at_the_interval() -> None:
    assert times_of_stores(lambda _: True, until_s=25.0) == [0.0, 10.0, 20.0]


def test_the_interval_may_differ_each_time() -> None:
    intervals = iter([1.0, 2.0, 4.0, 100.0])
    assert times_of_stores(lambda _: True, until_s=30.0, renew_s=lambda: next(intervals)) == [0, 1, 3, 7]


def test_failures_are_retried_with_a_back_off_up_to_the_interval() -> None:
    assert times_of_stores(lambda number: number > 6, until_s=50.0) == [0, 1, 3, 7, 15, 25, 35, 45]


def test_a_change_is_stored_at_once_when_the_last_store_is_old_enough() -> None:
    assert times_of_stores(lambda _: True, until_s=9.0, changes_at_s=(5.0,)) == [0.0, 5.0]


def test_changes_that_follow_each_other_share_a_store_after_the_gap() -> None:
    stored = times_of_stores(lambda _: True, until_s=9.0, changes_at_s=(0.5, 1.0, 1.5), gap_s=2.0)
    assert stored == [0.0, 2.0]
