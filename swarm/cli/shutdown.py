"""End a command on Ctrl-C, on SIGTERM, or when its parent process dies.

The first request sets a flag, which the training loop reads after each step. If the main thread still blocks
after a moment, it is interrupted; if it ignores the interruption, the process is ended. A command is
therefore gone within three seconds, and with `exit_with_parent` a child never outlives its parent.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

_INTERRUPT_S = 0.8
_ABANDON_S = 2.5
_REPEAT_S = 0.1  # how often to look whether an interruption was lost
_ORPHAN_S = (0.4, 1.5)  # `interrupt_s` and `abandon_s` once the parent has ended
_WAIT_S_MAX = 0.25  # the longest that a signal goes unnoticed while the main thread waits


class SignalAwareEvent(threading.Event):
    """An event that looks for signals while the main thread waits. Python runs handlers of signals in the
    main thread, between two instructions. A signal that arrives just before the wait, or in another thread,
    does not end a wait, so this one is made of pieces of `_WAIT_S_MAX`.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, at most for `timeout` seconds. Return whether it is set."""
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        while not self.is_set() and (left_s := until_s - time.monotonic()) > 0:
            super().wait(min(left_s, _WAIT_S_MAX))
        return self.is_set()


class Shutdown:
    """A context manager for the main thread. `requested` is set once the command should end, for `reason`."""

    def __init__(
        self,
        *,
        exit_with_parent: bool = False,
        interrupt_s: float = _INTERRUPT_S,
        abandon_s: float = _ABANDON_S,
    ) -> None:
        """`interrupt_s`: after this time a blocked main thread is interrupted. A command with a slow cleanup
        sets it higher. `abandon_s`: after this time the process is ended, even if its cleanup is not
        complete.
        """
        self.requested = SignalAwareEvent()
        self.reason = ""
        self._over = threading.Event()
        self._cleaning_up = threading.Event()
        self._lost = threading.Event()  # Python has ignored an interruption
        self._show_ignored = sys.unraisablehook
        self._interrupt_s, self._abandon_s = interrupt_s, abandon_s
        self._watch_parent = exit_with_parent
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Shutdown:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        self._show_ignored, sys.unraisablehook = sys.unraisablehook, self._on_ignored
        if self._watch_parent:
            threading.Thread(target=self._wait_for_parent, name="parent-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._over.set()
        sys.unraisablehook = self._show_ignored
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        # `_insist` caused this KeyboardInterrupt, and all cleanup handlers have run: this is a clean end.
        return kind is KeyboardInterrupt and self.requested.is_set()

    def begin_cleanup(self) -> None:
        """Do not interrupt the main thread any more: it is cleaning up. The limit `abandon_s` still holds."""
        self._cleaning_up.set()

    def request(self, reason: str) -> None:
        """Ask the command to end. May be called from any thread, any number of times."""
        if not self.requested.is_set():
            self.reason = reason
            self.requested.set()
            threading.Thread(target=self._insist, name="shutdown", daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested.is_set():
            raise KeyboardInterrupt
        self.request("Ctrl-C" if number == signal.SIGINT else "SIGTERM")

    def _on_ignored(self, ignored: sys.UnraisableHookArgs) -> None:
        """Note a lost interruption: Python prints and ignores one that arrives in a callback of a weak
        reference or in a `__del__`, for instance during an import.
        """
        if ignored.exc_type is KeyboardInterrupt and self.requested.is_set():
            self._lost.set()
        else:
            self._show_ignored(ignored)

    def _insist(self) -> None:
        if self._over.wait(self._interrupt_s):
            return
        until_s = time.monotonic() + self._abandon_s - self._interrupt_s
        self._lost.clear()  # one that was lost before, such as a second Ctrl-C, is repeated by the next line
        self._interrupt()
        while (left_s := until_s - time.monotonic()) > 0:
            if self._over.wait(min(left_s, _REPEAT_S)):
                return
            if self._lost.is_set():
                self._lost.clear()
                self._interrupt()
        sys.stderr.write("swarm: a part did not stop in time and was abandoned\n")
        sys.stderr.flush()
        os._exit(1)

    def _interrupt(self) -> None:
        """Interrupt the main thread, unless it is cleaning up."""
        main = threading.main_thread().ident
        if self._cleaning_up.is_set():
            pass
        elif hasattr(signal, "pthread_kill") and main is not None:
            signal.pthread_kill(main, signal.SIGINT)  # wakes it from a lock or a system call
        else:
            signal.raise_signal(signal.SIGINT)

    def _wait_for_parent(self) -> None:
        try:
            while os.read(0, 1024):
                pass
        except OSError:
            pass  # a standard input that cannot be read counts as closed
        # No process reads the summary any more, so both limits are short.
        self._interrupt_s, self._abandon_s = _ORPHAN_S
        self.request("the process that started this one ended")
