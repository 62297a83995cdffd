"""How a command ends when somebody wants it to: Ctrl-C, SIGTERM, or the death of the process that started it.

The first request sets a flag, which the training loop sees after its step. What still blocks after a moment
is interrupted; what ignores even that is ended. So a command is gone within three seconds, and with
`exit_with_parent` a child never outlives its parent, however that died.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType

_INTERRUPT_S = 0.8
_ABANDON_S = 2.5
_ORPHAN_S = (0.4, 1.5)  # both, when the parent is gone


class Shutdown:
    """A context manager for the main thread. `requested` is set once the command should end; `why` says what
    asked for it.
    """

    def __init__(
        self,
        *,
        exit_with_parent: bool = False,
        interrupt_s: float = _INTERRUPT_S,
        abandon_s: float = _ABANDON_S,
    ) -> None:
        """`interrupt_s`: how long what blocks may take to notice; a command whose own tidying takes time
        gives itself more; `abandon_s`: after so long it is ended, tidy or not.
        """
        self.requested = threading.Event()
        self.why = ""
        self._over = threading.Event()
        self._tidying = threading.Event()
        self._interrupt_s, self._abandon_s = interrupt_s, abandon_s
        self._watch_parent = exit_with_parent
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Shutdown:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        if self._watch_parent:
            threading.Thread(target=self._wait_for_parent, name="parent-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._over.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        # our own interruption of something that blocked is a clean end; Python's cleanup has run on the way
        # here
        return kind is KeyboardInterrupt and self.requested.is_set()

    def tidy(self) -> None:
        """What follows is cleaning up: it is not interrupted any more, only given up if it takes too long."""
        self._tidying.set()

    def request(self, why: str) -> None:
        """Ask the command to end; from any thread, any number of times."""
        if not self.requested.is_set():
            self.why = why
            self.requested.set()
            threading.Thread(target=self._insist, name="leaving", daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested.is_set():
            raise KeyboardInterrupt
        self.request("Ctrl-C" if number == signal.SIGINT else "SIGTERM")

    def _insist(self) -> None:
        if self._over.wait(self._interrupt_s):
            return
        main = threading.main_thread().ident
        if self._tidying.is_set():
            pass
        elif hasattr(signal, "pthread_kill") and main is not None:
            signal.pthread_kill(main, signal.SIGINT)  # wakes it from a lock or a system call
        else:
            signal.raise_signal(signal.SIGINT)
        if not self._over.wait(self._abandon_s - self._interrupt_s):
            sys.stderr.write("swarm: something did not stop in time and was left\n")
            sys.stderr.flush()
            os._exit(1)

    def _wait_for_parent(self) -> None:
        try:
            while os.read(0, 1024):
                pass
        except OSError:
            pass  # a standard input that cannot be read is as good as closed
        # nobody is there any more to whom a summary would matter
        self._interrupt_s, self._abandon_s = _ORPHAN_S
        self.request("the process that started this one ended")
