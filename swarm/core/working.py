"""Work that may take longer than a second, such as downloads, hashing and waiting for peers, which a user
is shown while it lasts.

Code that works says so with `working`; the command line shows it (`shown_by`). Without a command line, as in
programs that use the library, nothing is shown.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from swarm.core.wording import duration, size

SHOWN_AFTER_S: Final = 1.0  # shorter work is not shown
_INTERVAL_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One piece of work, at one moment."""

    what: str  # "downloading the state"
    seconds: float  # since it began
    done: int = 0
    total: int = 0  # 0: unknown
    unit: Literal["bytes", ""] = ""
    is_over: bool = False

    @property
    def text(self) -> str:
        """Return it in words: `downloading the state: 120 MB of 480 MB, 12 s`."""
        if not self.total:
            return f"{self.what}: {duration(self.seconds)}"
        done, total = (size(n) if self.unit == "bytes" else f"{n:,}" for n in (self.done, self.total))
        return f"{self.what}: {done} of {total}, {duration(self.seconds)}"


Show: TypeAlias = Callable[[Work], None]
Update: TypeAlias = Callable[[int, int], None]  # what is done and the total; from any thread

_shows: list[Show] = []  # the last one is used


@contextlib.contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """Let `show` show the work of all threads of this process while the context lasts. It is called from
    several threads.
    """
    _shows.append(show)
    try:
        yield
    finally:
        _shows.remove(show)


@contextlib.contextmanager
def working(what: str, *, unit: Literal["bytes", ""] = "") -> Iterator[Update]:
    """Show that this process does `what` while the context lasts, if that is longer than a second. Yield a
    function that takes how much is done, and of how much.
    """
    shower = _shows[-1] if _shows else None
    if shower is None:
        yield lambda done, total: None
        return
    began_s, ended, at, was_shown = time.monotonic(), threading.Event(), [0, 0], False

    def show(*, is_over: bool = False) -> None:
        nonlocal was_shown
        seconds, was_shown = time.monotonic() - began_s, True
        if shower in _shows:  # it still shows something
            shower(Work(what=what, seconds=seconds, done=at[0], total=at[1], unit=unit, is_over=is_over))

    def watch() -> None:
        wait_s = SHOWN_AFTER_S
        while not ended.wait(wait_s):
            show()
            wait_s = _INTERVAL_S

    def update(done: int, total: int) -> None:
        at[:] = done, total

    watcher = threading.Thread(target=watch, name=f"shows: {what}", daemon=True)
    watcher.start()
    try:
        yield update
    finally:
        ended.set()
        watcher.join()
        if was_shown:
            show(is_over=True)
