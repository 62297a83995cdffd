"""Where a round's tensor work is done: in the node's pool, or, where cores are few, on the event loop between
other things.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from averaging.allreduce.config import INLINE_BELOW_CORES, RoundConfig, cores

A = TypeVar("A")
T = TypeVar("T")


class ComputeOffload:
    """One round's work. `finish` returns when nothing of it runs any more."""

    def __init__(self, pool: Executor, config: RoundConfig) -> None:
        self.inline = config.inline if config.inline is not None else cores() < INLINE_BELOW_CORES
        self._pool = pool
        self._jobs: set[asyncio.Future[Any]] = set()

    def start(self, function: Callable[[A], T], argument: A) -> asyncio.Future[T]:
        """Begin a piece of work in the pool. It ends even if nobody waits for it any more: `finish` does."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, function, argument)
        self._jobs.add(future)
        future.add_done_callback(self._jobs.discard)
        return future

    async def work(self, function: Callable[[A], T], argument: A) -> T:
        """Do a piece of work."""
        if not self.inline:
            return await asyncio.shield(self.start(function, argument))
        result = function(argument)
        # the loop answers beats, and everything else of the node, between two pieces of work
        await asyncio.sleep(0)
        return result

    async def finish(self) -> None:
        """Wait for what was begun: it reads and writes tensors that the caller is about to get back."""
        if self._jobs:
            await asyncio.wait(self._jobs)


async def drain(queue: asyncio.Queue[T], count_max: int) -> list[T]:
    """At least one item, and what else is there, up to `count_max`."""
    items = [await queue.get()]
    while len(items) < count_max and not queue.empty():
        items.append(queue.get_nowait())
    return items
