"""A worker's end of the channel to the command that started it: JSON lines over pipes.

Standard library only, since it also runs in the environments of other libraries.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

POLL_S = 0.005


class WorkerChannel:
    """Messages to and from the command. Standard output is reserved for them: what libraries print goes to
    the log with standard error.
    """

    def __init__(self) -> None:
        self.configuration: dict[str, Any] = json.loads(sys.argv[1])
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def send(self, kind: str, **fields: Any) -> None:
        self._answers.write(json.dumps({"kind": kind, **fields}) + "\n")

    def receive(self) -> dict[str, Any]:
        """Return the next order. When the command has ended, this worker and all processes that it started
        end at once.
        """
        line = sys.stdin.readline()
        if not line:
            end_own_session()
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def publish(self, name: str, text: str) -> None:
        """Make `text` available to the other workers of this launch under `name`."""
        folder = Path(self.configuration["rendezvous"])
        partial = folder / f".{name}.{os.getpid()}"
        partial.write_text(text)
        partial.rename(folder / name)

    def published(self, name: str, timeout_s: float = 60.0) -> str:
        """Wait for the text that another worker publishes under `name`. Raises TimeoutError after
        `timeout_s`.
        """
        path = Path(self.configuration["rendezvous"]) / name
        deadline_s = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no worker published {name!r} in {timeout_s:g} s")
            time.sleep(POLL_S)
        return path.read_text()


def wait_until(monotonic_s: float) -> None:
    """Sleep until a moment of the monotonic clock, which all processes of a machine share, for aligned
    starts.

    The last half millisecond is spent in a loop instead of a sleep.
    """
    while (left_s := monotonic_s - time.monotonic()) > 0:
        if left_s > 0.0005:
            time.sleep(left_s - 0.0005)


def end_own_session() -> None:
    if os.getpgrp() == os.getpid():  # the command starts workers as leaders of their process groups
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
