"""A `swarm serve` process, for tests that call it, interrupt it or start several of them."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

READY_S = 60.0
OPTIONS = ("--listen", "127.0.0.1:0", "--json", "--device", "cpu")


class Served:
    """A `swarm serve` process and its events."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swarm.cli", "serve", *arguments, *OPTIONS],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(json.loads(line))
        self.events.put(None)

    def hear(self, kind: str) -> dict[str, Any]:
        deadline_s = time.monotonic() + READY_S
        while True:
            event = self.events.get(timeout=max(deadline_s - time.monotonic(), 0.01))
            assert event is not None, self.process.communicate()[1]
            if event["event"] == kind:
                return event

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    served = Served(*arguments)
    try:
        yield served
    finally:
        served.end()
