"""Waiting for something that happens elsewhere: the one way in which a task waits until then or a timeout."""

from __future__ import annotations

import asyncio


async def wait_until_set(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait until `event` is set, at most `timeout_s` seconds (None: without limit). Return whether it is."""
    if timeout_s is None:
        await event.wait()
        return True
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


class ChangeEvent:
    """An event for a task that looks at some state, does what there is to do, and waits until the state
    changes.

    A change that is reported while nobody waits is remembered until the next `wait`, so none is missed. Not
    thread-safe: another thread calls `loop.call_soon_threadsafe(event.notify)`.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Report a change, and wake the tasks that wait."""
        self._event.set()

    def clear(self) -> None:
        """Forget the changes reported so far: the caller is about to look at the state anyway."""
        self._event.clear()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a change that no earlier `wait` returned for, at most `timeout_s` seconds (None: without
        limit). Return whether there was one.
        """
        if not self._event.is_set():
            if timeout_s is None:
                await self._event.wait()
            elif not await wait_until_set(self._event, timeout_s):
                return False
        self._event.clear()
        return True
