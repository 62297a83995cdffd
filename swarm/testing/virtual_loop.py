"""An asyncio event loop in virtual time: services run in it unchanged, hours pass in seconds, and nothing
sleeps.

    async def scenario() -> None:
        await asyncio.sleep(3600)          # returns at once; the loop's clock jumps

    run_virtual(scenario())

Time stands still while any task can run, and jumps to the next timer when none can. There are no sockets,
threads or signals; `run_in_executor` runs its function on the loop, so that a pool (None is sufficient) costs
no virtual time and changes no order. When every task waits and no timer is set, `run_virtual` raises
`Deadlock` instead of hanging.

Callbacks run in the order in which they were scheduled, and timers of one moment in the order in which they
were set. Tasks hash by their number, not by their address, so that iteration over a set of tasks (as in
asyncio's TaskGroup) has the same order in every run. Code under test that iterates over a set of strings or
PeerIDs remains, because their hashes differ between processes: `tests/sim/test_network.py` runs scenarios
under several PYTHONHASHSEEDs and compares.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from swarm.core.errors import DeadlineExceeded

T = TypeVar("T")

# start of virtual Unix time: any fixed moment would do; this one is in 2027, within every certificate's
# validity
EPOCH_UNIX_S = 1_800_000_000.0
# cancelled timers are removed when there are more than this many, and more of them than of others
_CANCELLED_MIN = 256


class Deadlock(RuntimeError):
    """Every task waits and no timer is set."""


class _Task(asyncio.Task[Any]):
    """A task that hashes by its number."""

    _numbers = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(_Task._numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _NoSelector:
    """Substitute for the selector, without sockets."""

    def select(self, timeout: float | None) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop; use it through `run_virtual`, or as `asyncio.Runner(loop_factory=VirtualLoop)`."""

    _ready: deque[asyncio.Handle]  # asyncio's own
    _stopping: bool

    def __init__(self, limit_s: float = float("inf")) -> None:
        super().__init__()
        self._now_s = 0.0
        self._limit_s = limit_s
        self._selector = _NoSelector()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # a heap
        self._numbers = itertools.count()
        self._cancelled = 0  # timers of the heap that will not run
        _Task._numbers = itertools.count()
        self.set_task_factory(lambda loop, coroutine, **options: _Task(coroutine, loop=loop, **options))

    def time(self) -> float:
        return self._now_s

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        # like asyncio's, on a heap of plain tuples: asyncio compares timers in Python, which takes a fifth of
        # the time of a simulated message
        self._check_closed()  # type: ignore[attr-defined]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled += 1
        if self._cancelled > _CANCELLED_MIN and 2 * self._cancelled > len(self._timers):
            self._timers = [
                item for item in self._timers if not item[2].cancelled() and item[2] is not handle
            ]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready and not self._stopping:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
                self._cancelled = max(self._cancelled - 1, 0)
            if not timers:
                raise Deadlock("every task waits and no timer is set: nothing can happen any more")
            self._advance_to(timers[0][0])
        now_s = self._now_s
        while timers and timers[0][0] <= now_s:
            timer = heapq.heappop(timers)[2]
            if timer.cancelled():
                self._cancelled = max(self._cancelled - 1, 0)
            else:
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _advance_to(self, when_s: float) -> None:
        """Advance virtual time. Raise DeadlineExceeded beyond the limit of `run_virtual`."""
        self._now_s = max(self._now_s, when_s)
        if self._now_s > self._limit_s:
            raise DeadlineExceeded(f"the scenario has not ended after {self._limit_s:g} virtual seconds")

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        async def run() -> T:
            return func(*args)

        return self.create_task(run())

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        pass


def run_virtual(main: Coroutine[Any, Any, T], *, limit_s: float = 7 * 24 * 3600.0) -> T:
    """Run `main` to its end in virtual time, like `asyncio.run`, and return its result. Raise Deadlock when
    nothing can happen any more, and DeadlineExceeded after `limit_s` virtual seconds.

    The garbage collector visits only objects that the run makes. Imported modules have half a million, and a
    collection of all of them takes as long as hundreds of simulated messages.
    """
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit_s)) as runner:
            return runner.run(main)
    finally:
        gc.unfreeze()


async def until(holds: Callable[[], bool], limit_s: float, every_s: float = 0.25) -> bool:
    """Look every `every_s` seconds whether something holds. Return whether it did within `limit_s`."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + limit_s
    while not (found := holds()) and loop.time() < end_s:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(every_s)
    return found


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Run the garbage collector only where the scenario calls it. It ends the coroutines of killed processes,
    whose `finally` has effects: these must happen at the same virtual time in every run.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class VirtualClock:
    """A peer's clock in virtual time.

    `skew_s` is the error of its machine when the simulation begins; `drift` is by how much it runs fast
    (1e-4: 0.36 s an hour), slow when negative; `offset_s` is the correction that the peer itself applies. The
    loop's own timers do not drift.
    """

    def __init__(self, skew_s: float = 0.0, drift: float = 0.0) -> None:
        self.skew_s = skew_s
        self.drift = drift
        self.offset_s = 0.0
        self.stopped_s: float | None = None  # the clock stands still at this time while the process continues

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time() * (1.0 + self.drift)

    def swarm_s(self) -> float:
        if self.stopped_s is not None:
            return self.stopped_s
        return EPOCH_UNIX_S + self.monotonic_s() + self.skew_s + self.offset_s

    @property
    def error_s(self) -> float:
        """Return the difference between this peer's swarm time and the simulation's."""
        return self.swarm_s() - EPOCH_UNIX_S - asyncio.get_running_loop().time()
