"""Events and conditions with which the user's threads wait for the network thread.

A node has one `Waits`. `ThreadWaits` blocks the calling thread. Simulations use one with which the simulated
trainers wait in virtual time, on one thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class WaitEvent(Protocol):
    """A flag to wait for, with the methods of `threading.Event` that swarm uses."""

    def is_set(self) -> bool:
        """Return whether the event was set."""
        ...

    def set(self) -> None:
        """Set the event and wake all waiters."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, at most `timeout` seconds, and return whether it is."""
        ...


class WaitCondition(Protocol):
    """A condition variable, with the methods of `threading.Condition` that swarm uses."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `predicate()` is true, at most `timeout` seconds, and return whether it is."""
        ...

    def notify_all(self) -> None:
        """Make all waiters check their predicates again. The lock is held."""
        ...


class Waits(Protocol):
    """Factory of events and conditions for waiting threads."""

    def event(self) -> WaitEvent:
        """Return a new event. Waiting for an event that is never set is a pause."""
        ...

    def condition(self, lock: threading.Lock) -> WaitCondition:
        """Return a new condition variable on a lock."""
        ...


class ThreadWaits:
    """Waits that block the calling thread."""

    def event(self) -> WaitEvent:
        return threading.Event()

    def condition(self, lock: threading.Lock) -> WaitCondition:
        return threading.Condition(lock)
