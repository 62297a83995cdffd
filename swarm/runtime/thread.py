"""The network thread: one daemon thread with one event loop, on which all coroutines of a node run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Generic, TypeVar

from swarm.core.errors import DeadlineExceeded, UsageError
from swarm.runtime.waits import ThreadWaits, Waits

_logger = logging.getLogger(__name__)
T = TypeVar("T")

POOL_THREADS_MAX = 4
# Timeout of work that needs the loop but no peer. Importing torch holds the GIL for seconds: on a busy
# machine this thread has waited for more than five.
TURN_S_MAX: Final = 60.0
_STOP_S_MAX = 1.0


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop event loop where uvloop is installed, else asyncio's. No policy is set: that would
    change every other event loop of the process.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class NetworkThread:
    """A thread with an event loop. `run` and `submit` are for other threads; coroutines on the loop simply
    await. `pool` is for tensor work (torch releases the GIL there), `waits` makes the events and conditions
    on which other threads wait.
    """

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._stopped = False
        self._lock = threading.Lock()
        self.waits: Waits = ThreadWaits()
        self.loop = new_event_loop()
        self.loop.set_exception_handler(_report)
        self.pool = ThreadPoolExecutor(
            min(POOL_THREADS_MAX, os.cpu_count() or 1), thread_name_prefix="swarm-network-pool"
        )
        self._thread = threading.Thread(target=self._serve, name="swarm-network", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop, wait, and return its result. Raises DeadlineExceeded (the coroutine is
        cancelled), the coroutine's exception, or UsageError in a forked child or after `stop`.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise UsageError(
                "a blocking call on the network thread would wait for itself: await the coroutine instead"
            )
        work = _Work(coroutine, self.loop)
        try:
            self.check()
            self.loop.call_soon_threadsafe(work.begin)
        except BaseException:
            coroutine.close()
            raise
        has_ended = False
        try:
            has_ended = work.wait(timeout_s)
        finally:
            if not has_ended:  # also after Ctrl-C the coroutine must not continue
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                    self.loop.call_soon_threadsafe(work.cancel)
        if not has_ended:
            raise DeadlineExceeded(f"no result within {timeout_s:g} s")
        return work.result()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop and return its future. Raises UsageError in a forked child or after
        `stop`.
        """
        try:
            self.check()
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except BaseException:
            coroutine.close()
            raise

    def check(self) -> None:
        """Raise UsageError if this object cannot be used in this process."""
        if os.getpid() != self._process_id:
            raise UsageError(
                f"this node belongs to process {self._process_id} and was inherited by a fork "
                f"({os.getpid()}): "
                "use it in the process that made it, and give DataLoader workers data only"
            )
        if self._stopped:
            raise UsageError("this node is closed")

    @property
    def is_own_process(self) -> bool:
        """Return False in a forked child, else True."""
        return os.getpid() == self._process_id

    @property
    def is_current_thread(self) -> bool:
        """Return whether the caller is on the network thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Cancel all coroutines, and end the loop and the thread within about _STOP_S_MAX. Idempotent; does
        nothing in a forked child.
        """
        with self._lock:
            if self._stopped or os.getpid() != self._process_id:
                return
            self._stopped = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S_MAX + 0.5)
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)  # affects this thread only
        try:
            self.loop.run_forever()
        finally:
            self._drain()
            self.loop.close()

    def _drain(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            if not _belongs_to_grpc(task):
                task.cancel()
        self._wait_for(tasks)
        for task in (stuck := {task for task in tasks if not task.done()}):
            _logger.warning("%s did not stop within %.1f s of being cancelled", task.get_name(), _STOP_S_MAX)
            task.cancel()
        self._wait_for(stuck)
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())

    def _wait_for(self, tasks: set[asyncio.Task[Any]]) -> None:
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=_STOP_S_MAX))


class _Work(Generic[T]):
    """A coroutine on the loop for which another thread waits. Futures of `concurrent.futures` do the same
    with two more turns of the loop and several times the work, and a call of an expert waits once for each
    pass.
    """

    __slots__ = ("_coroutine", "_error", "_has_ended", "_is_waiting", "_loop", "_result", "_task")

    def __init__(self, coroutine: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._coroutine, self._loop = coroutine, loop
        self._is_waiting = threading.Lock()  # held until the coroutine has ended
        self._is_waiting.acquire()
        self._has_ended = False
        self._error: BaseException | None = None
        self._result: T
        self._task: asyncio.Task[None]

    def begin(self) -> None:
        """Start the coroutine. Called on the loop."""
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._on_done)

    def cancel(self) -> None:
        """Cancel the coroutine, which has begun. Called on the loop."""
        self._task.cancel()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until the coroutine has ended, and return whether it has."""
        return self._is_waiting.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0.0))

    def result(self) -> T:
        """Return the result of the coroutine, which has ended, or raise its exception."""
        error, self._error = self._error, None
        if error is None:
            result = self._result
            del self._result  # the loop may hold this object for a moment more, and the result may be large
            return result
        if isinstance(error, asyncio.CancelledError):
            raise UsageError("the node was closed while this call was waiting") from None
        try:
            raise error
        finally:
            del error  # it holds its traceback, which holds this frame

    async def _run(self) -> None:
        try:
            self._result = await self._coroutine
        finally:
            self._end(sys.exception())

    def _end(self, error: BaseException | None) -> None:
        self._error, self._has_ended = error, True
        self._is_waiting.release()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not self._has_ended:  # it was cancelled before it began
            self._coroutine.close()
            self._end(asyncio.CancelledError())
        if not task.cancelled():
            task.exception()  # the waiting thread raises it: it is not one that nobody has seen


def _belongs_to_grpc(task: asyncio.Task[Any]) -> bool:
    """Return whether a task belongs to gRPC. Such tasks end with its server, sometimes a moment later. If one
    is cancelled then, it prints a traceback and its last event finds the loop closed.
    """
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and "grpc/_cython" in code.co_filename


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error of the loop, except a harmless one: gRPC wakes all event loops of a process for each
    event, and only one of them finds data to read.
    """
    if isinstance(context.get("exception"), BlockingIOError) and "PollerCompletionQueue" in str(
        context.get("handle", context.get("message", ""))
    ):
        return
    default: Callable[[dict[str, Any]], None] = loop.default_exception_handler
    default(context)
