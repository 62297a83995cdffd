"""Coroutines side by side, with one error to report."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from swarm.core.errors import NetworkError, SwarmError


async def run_concurrently(
    *work: Coroutine[Any, Any, None], until: Coroutine[Any, Any, None] | None = None
) -> None:
    """Run all of `work` side by side; the first error ends the rest and is raised as it is. `until` runs for
    as long as they do.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(until) if until is not None else None
            running = [tasks.create_task(coroutine) for coroutine in work]
            await asyncio.wait(running)
            if watch is not None:
                watch.cancel()
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report: our own bugs first, then what peers did, then what the network did."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found.append(first_error(error) if isinstance(error, BaseExceptionGroup) else error)
    return min(
        found,
        key=lambda error: 2 if isinstance(error, NetworkError) else 1 if isinstance(error, SwarmError) else 0,
    )
