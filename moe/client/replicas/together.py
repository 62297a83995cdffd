"""Coroutines that run together, a few at a time; the first error ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from swarm.core.errors import SwarmError

T = TypeVar("T")


async def run_together(work: Sequence[Coroutine[Any, Any, T]], in_flight_max: int) -> list[T]:
    """Run all coroutines, at most `in_flight_max` at a time, and return their results in order.

    Raises the first SwarmError that one of them raises; the others are cancelled then.
    """
    slots = asyncio.Semaphore(in_flight_max)

    async def run_in_slot(one: Coroutine[Any, Any, T]) -> T:
        async with slots:
            return await one

    # raised below: early versions of Python 3.11 wrap errors raised within `except*` in a group
    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(run_in_slot(one)) for one in work]
    except* SwarmError as errors:
        failed = _first_error(errors)
    finally:
        for one in work:
            one.close()  # coroutines that never began must be closed
    if failed is not None:
        raise failed
    return [task.result() for task in running]


async def start(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a call, and return when it was prepared and sent, if nothing holds it up. Calls of several peers
    are started in turn: each peer computes while the next call is prepared.
    """
    task = tasks.create_task(work)
    await asyncio.sleep(0)  # it is prepared
    await asyncio.sleep(0)  # it is sent
    return task


def _first_error(errors: BaseExceptionGroup[SwarmError]) -> SwarmError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, SwarmError)
    return error
