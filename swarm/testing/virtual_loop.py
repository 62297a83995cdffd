"""An asyncio event loop in virtual time: services run in it unchanged, hours pass in seconds, nothing ever sleeps.

    async def scenario() -> None:
        await asyncio.sleep(3600)          # returns at once; the loop's clock jumps

    run_virtual(scenario())

Time stands still while any task can run, and jumps to the next timer when none can. There are no sockets, no threads and no signals;
`run_in_executor` runs its function on the loop, so that a pool (None will do) costs no virtual time and changes no order. When every
task waits and no timer is set, nothing can ever happen again: `run_virtual` raises `Deadlock` instead of hanging. Callbacks run in
the order in which they were scheduled, so that a scenario whose chances come from a seed repeats itself exactly (within one process;
across processes set PYTHONHASHSEED when the code under test iterates over sets of strings).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from swarm.errors import DeadlineExceeded

T = TypeVar("T")

# Where virtual Unix time begins: any fixed moment does; this one is in 2027, within every certificate's validity.
EPOCH_UNIX_S = 1_800_000_000.0


class Deadlock(RuntimeError):
    """Every task waits and no timer is set."""


class _Jump:
    """Stands where a selector would: instead of waiting for sockets it moves the loop's clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock("every task waits and no timer is set: nothing can happen any more")
        self._loop.advance(timeout)
        return []

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop itself; use it through `run_virtual`, or as `asyncio.Runner(loop_factory=VirtualLoop)`."""

    def __init__(self, limit_s: float = float("inf")) -> None:
        super().__init__()
        self._now_s = 0.0
        self._limit_s = limit_s
        self._selector = _Jump(self)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._now_s

    def advance(self, duration_s: float) -> None:
        """Let virtual time pass; DeadlineExceeded beyond the limit that was given to `run_virtual`."""
        self._now_s += duration_s
        if self._now_s > self._limit_s:
            raise DeadlineExceeded(f"the scenario has not ended after {self._limit_s:g} virtual seconds")

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        async def run() -> T:
            return func(*args)

        return self.create_task(run())

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        return self.call_soon(callback, *args, context=context)

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        pass


def run_virtual(main: Coroutine[Any, Any, T], *, limit_s: float = 7 * 24 * 3600.0) -> T:
    """Run `main` to its end in virtual time, like `asyncio.run`. `limit_s`: virtual seconds after which the scenario counts as stuck."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit_s)) as runner:
        return runner.run(main)


class VirtualClock:
    """A peer's clock in virtual time. `skew_s`: how wrong its machine is; `offset_s`: the correction that the peer itself applies."""

    def __init__(self, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s
        self.offset_s = 0.0

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()

    def swarm_s(self) -> float:
        return EPOCH_UNIX_S + asyncio.get_running_loop().time() + self.skew_s + self.offset_s
