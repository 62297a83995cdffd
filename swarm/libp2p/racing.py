"""Try several ways to connect to one peer; the first that succeeds is used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

from swarm.core.errors import DeadlineExceeded, NetworkError, SwarmError
from swarm.core.ids import PeerId

STAGGER_S = 0.25  # delay between the starts of two attempts
T = TypeVar("T")


class Races(Generic[T]):
    """Attempts to reach peers, by one caller at a time for each peer. A second caller uses the result of the
    first, or tries after it.
    """

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[PeerId, asyncio.Lock] = WeakValueDictionary()

    async def run(
        self,
        peer_id: PeerId,
        known: Callable[[], T | None],
        attempts: Sequence[tuple[str, Callable[[], Awaitable[T]]]],
        timeout_s: float,
    ) -> T:
        """Return the result of `known` unless that is None, otherwise the result of the first attempt that
        succeeds. `attempts`: their names, and functions that begin them. Raises NetworkError that names
        the failure of each, DeadlineExceeded after `timeout_s`.
        """
        turn = self._turns.setdefault(peer_id, asyncio.Lock())
        what = f"cannot reach {peer_id}"
        try:
            async with asyncio.timeout(timeout_s), turn:
                found = known()
                return found if found is not None else await _first_of(attempts, what)
        except TimeoutError:
            raise DeadlineExceeded(f"{what}: no answer within {timeout_s:.1f} s") from None


async def _first_of(attempts: Sequence[tuple[str, Callable[[], Awaitable[T]]]], what: str) -> T:
    """Return the result of the first attempt that succeeds. Each begins 0.25 s after the previous one, or as
    soon as that has failed. The others are cancelled.
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

    async with asyncio.TaskGroup() as group:
        tasks.append(group.create_task(begin(group)))
    if not won:
        raise NetworkError(f"{what}: {'; '.join(failures) or 'there is no way to it'}")
    return won[0]
