"""The place where a round's tensor work is done: the node's pool, or, where cores are few and all tensors are
on the host, the event loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from averaging.reduction.devices import NO_QUEUES, Queues, describe_out_of_memory
from swarm.core.device import is_out_of_memory, usable_cores

A = TypeVar("A")
T = TypeVar("T")

# with fewer cores, handing work to another thread costs more than it saves: 8 % of a round's processor time
# on two cores
INLINE_BELOW_CORES = 4


class OutOfMemory(Exception):
    """A device or the host had no memory left for a piece of work. The text is the end of a sentence about
    this peer.

    No SwarmError: nothing that a peer or the network does is taken for it, and it ends the round before those
    do.
    """


class ComputeOffload:
    """The tensor work of one round. `finish` returns when all of it has ended. Errors for lack of memory are
    raised as OutOfMemory; no further work is started then.
    """

    def __init__(self, pool: Executor, queues: Queues = NO_QUEUES, *, heavy: bool = False) -> None:
        """`queues`: of the devices that are worked on. Such work may wait for a device, and is never done on
        the event loop; nor is `heavy` work, of which one piece takes long.
        """
        self.inline = usable_cores() < INLINE_BELOW_CORES and not queues and not heavy
        self.out_of_memory = ""  # step in which memory ran out; "": none
        self._pool = pool
        self._queues = queues
        self._jobs: set[asyncio.Future[Any]] = set()
        self._prepared = asyncio.Event()
        self._prepared.set()

    async def prepare(self, function: Callable[[A], T], argument: A) -> T:
        """Run the first piece of work. If it may wait for a device, `work` waits until it has ended."""
        if not self._queues:
            return self._done(function, argument)
        self._prepared.clear()
        try:
            return await asyncio.shield(self.start(function, argument))
        finally:
            self._prepared.set()

    def start(self, function: Callable[[A], T], argument: A) -> asyncio.Future[T]:
        """Start a piece of work in the pool. `finish` waits for it, even if nobody else does."""
        future = asyncio.get_running_loop().run_in_executor(
            self._pool, functools.partial(self._done, function), argument
        )
        self._jobs.add(future)
        future.add_done_callback(self._over)
        return future

    async def work(self, function: Callable[[A], T], argument: A) -> T:
        """Run a piece of work, and return its result."""
        await self._prepared.wait()
        if self.out_of_memory:
            raise OutOfMemory(self.out_of_memory)
        if not self.inline:
            return await asyncio.shield(self.start(function, argument))
        result = self._done(function, argument)
        # between two pieces of work the loop answers heartbeats and all other calls of the node
        await asyncio.sleep(0)
        return result

    async def finish(self) -> None:
        """Wait for all started work: it reads and writes tensors that the caller is about to get back."""
        if self._jobs:
            await asyncio.wait(self._jobs)

    def _done(self, function: Callable[[A], T], argument: A) -> T:
        try:
            return function(argument)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.out_of_memory = describe_out_of_memory(error, self._queues)
        # without its cause, whose traceback holds the tensors of the failed work
        raise OutOfMemory(self.out_of_memory)

    def _over(self, future: asyncio.Future[Any]) -> None:
        self._jobs.discard(future)
        if not future.cancelled():
            # marks the exception as retrieved: nobody awaits work that began before the round failed
            future.exception()


async def drain(queue: asyncio.Queue[T], count_max: int) -> list[T]:
    """Wait for at least one item. Return it with the others that are in the queue, up to `count_max`."""
    items = [await queue.get()]
    while len(items) < count_max and not queue.empty():
        items.append(queue.get_nowait())
    return items
