"""Several ways to one peer at once: the first that works wins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from swarm.core.errors import DeadlineExceeded, NetworkError, SwarmError

STAGGER_S = 0.25  # between the beginnings of two attempts
T = TypeVar("T")


async def first_of(
    attempts: Sequence[tuple[str, Callable[[], Awaitable[T]]]], what: str, timeout_s: float
) -> T:
    """Return what the first attempt returns that does not fail; each begins 0.25 s after the one before, or
    as soon as that has failed. The others are cancelled.

    `attempts`: their names, and what begins them. `what`: what could not be done, for the messages. Raises
    NetworkError that names what each attempt met, DeadlineExceeded after `timeout_s`.
    """
    won: list[T] = []
    failures: list[str] = []
    over = [asyncio.Event() for _ in attempts]
    tasks: list[asyncio.Task[None]] = []

    async def run(number: int, name: str, attempt: Callable[[], Awaitable[T]]) -> None:
        try:
            won.append(await attempt())
        except SwarmError as error:
            failures.append(f"{name}: {error}")
            over[number].set()
            return
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()

    async def begin(group: asyncio.TaskGroup) -> None:
        for number, (name, attempt) in enumerate(attempts):
            tasks.append(group.create_task(run(number, name, attempt)))
            try:
                async with asyncio.timeout(STAGGER_S):
                    await over[number].wait()
            except TimeoutError:
                pass

    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            tasks.append(group.create_task(begin(group)))
    except TimeoutError:
        raise DeadlineExceeded(f"{what}: no answer within {timeout_s:.1f} s") from None
    if not won:
        raise NetworkError(f"{what}: {'; '.join(failures) or 'there is no way to it'}")
    return won[0]
