"""Worker processes that exchange JSON lines with the test and are killed together with their children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any


class Worker:
    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def tell(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        """Kill the worker and its children."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
