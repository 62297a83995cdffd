"""Threads of simulated peers: blocking code on virtual time.

The optimizer blocks its trainer's thread: in a simulation that thread is a greenlet on the thread of the
virtual event loop. A call that would block switches back to the loop, which resumes it at the right virtual
time or when it is woken. One operating system thread thus runs all trainers of a swarm, always in the same
order.

    network = GreenNetwork()                       # in place of `swarm.runtime.thread.NetworkThread`
    await network.run_thread(train)                # `train()` may use `network.run` and `network.waits`
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

import greenlet

from swarm.core.errors import DeadlineExceeded, UsageError

T = TypeVar("T")


class ThreadKilledError(BaseException):
    """Raised by every waiting call in a green thread whose process was killed."""


class GreenEvent:
    """A `WaitEvent` for green threads."""

    def __init__(self, network: GreenNetwork) -> None:
        self._network = network
        self._is_set = False
        self._waiting: list[asyncio.Future[None]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for woken in self._waiting:
            _wake(woken)

    def wait(self, timeout: float | None = None) -> bool:
        if self._is_set:
            return True
        loop = self._network.loop
        woken: asyncio.Future[None] = loop.create_future()
        timer = None if timeout is None else loop.call_later(timeout, _wake, woken)
        self._waiting.append(woken)
        try:
            self._network.wait_for(woken)
        finally:
            self._waiting.remove(woken)
            if timer is not None:
                timer.cancel()
        return self._is_set


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


class GreenCondition:
    """A `WaitCondition` for green threads. No thread is switched to while the lock is held, so that it is
    always free.
    """

    def __init__(self, network: GreenNetwork, lock: threading.Lock) -> None:
        self._network, self._lock = network, lock
        self._events: list[GreenEvent] = []

    def __enter__(self) -> bool:
        taken = self._lock.acquire(blocking=False)
        assert taken, "a lock is held across a wait"
        return taken

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._lock.release()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        loop = self._network.loop
        end_s = None if timeout is None else loop.time() + timeout
        while not predicate():
            left_s = None if end_s is None else end_s - loop.time()
            if left_s is not None and left_s <= 0.0:
                return False
            event = GreenEvent(self._network)
            self._events.append(event)
            self._lock.release()
            try:
                event.wait(left_s)
            finally:
                self._lock.acquire()
                self._events.remove(event)
        return True

    def notify_all(self) -> None:
        for event in self._events:
            event.set()


class GreenWaits:
    """Factory of events and conditions for the green threads of one simulated process."""

    def __init__(self, network: GreenNetwork) -> None:
        self._network = network

    def event(self) -> GreenEvent:
        return GreenEvent(self._network)

    def condition(self, lock: threading.Lock) -> GreenCondition:
        return GreenCondition(self._network, lock)


class GreenNetwork:
    """The network thread of a simulated process, and its green threads. Create it on the event loop."""

    is_own_process = True

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop_greenlet = greenlet.getcurrent()
        self.pool: Any = None
        self.waits = GreenWaits(self)
        self._killed = False
        self._calls: dict[concurrent.futures.Future[Any], None] = {}
        self._threads: dict[asyncio.Task[Any], None] = {}  # the tasks that run them

    @property
    def is_current_thread(self) -> bool:
        """Return whether the caller is on the event loop."""
        return greenlet.getcurrent() is self.loop_greenlet

    def check(self) -> None:
        """Raise UsageError after the process has ended."""
        if self._killed:
            raise UsageError("this node is closed")

    async def run_thread(self, function: Callable[[], None]) -> None:
        """Run `function` on a green thread until it returns or the process is killed. Raise its exception."""
        task = asyncio.current_task()
        assert task is not None
        thread = greenlet.greenlet(function, self.loop_greenlet)
        self._threads[task] = None
        try:
            woken = thread.switch()
            while not thread.dead:
                await woken
                woken = thread.switch()
        except asyncio.CancelledError:
            with contextlib.suppress(ThreadKilledError):
                thread.throw(ThreadKilledError)
            if not self._killed:
                raise
        finally:
            self._threads.pop(task)

    def wait_for(self, woken: asyncio.Future[None]) -> None:
        """Let the calling green thread wait for a future. Raise ThreadKilledError in a killed process."""
        if self._killed:
            raise ThreadKilledError
        self.loop_greenlet.switch(woken)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop and return its future."""
        if self._killed:
            coroutine.close()
            raise ThreadKilledError
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        self._calls[future] = None
        future.add_done_callback(lambda done: self._calls.pop(done, None))
        return future

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop, let this green thread wait, and return its result; the errors of
        `NetworkThread.run`.
        """
        assert not self.is_current_thread, "a blocking call on the event loop would wait for itself"
        future, ended = self.submit(coroutine), GreenEvent(self)
        future.add_done_callback(lambda _: ended.set())
        try:
            ended.wait(timeout_s)
            if not future.done():
                raise DeadlineExceeded(f"no result within {timeout_s:g} s")
            return future.result(0)
        except concurrent.futures.CancelledError:
            raise UsageError("the node was closed while this call was waiting") from None
        finally:
            future.cancel()

    def kill(self) -> None:
        """End all threads where they wait, and cancel what they have started, as a killed process does."""
        self._killed = True
        for future in list(self._calls):
            future.cancel()
        for task in list(self._threads):
            task.cancel()
