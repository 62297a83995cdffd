"""Real swarm commands that print JSON, each with a home folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Command:
    """A swarm command whose output is JSON, in a home folder of its own."""

    def __init__(self, home: Path, launcher: tuple[str, ...], *arguments: str) -> None:
        home.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
        folders = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "c"), "XDG_STATE_HOME": str(home / "s")}
        folders |= {"XDG_CACHE_HOME": str(home / "k"), "XDG_DATA_HOME": str(home / "d")}
        self.process = subprocess.Popen(
            [*launcher, "-m", "swarm.cli", *arguments, "--json"],
            env={**kept, **folders, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.events: list[dict[str, Any]] = []

    def read_until(self, name: str) -> dict[str, Any]:
        """Read events until one of this name, and return it."""
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                self.events.append(json.loads(line))
                if self.events[-1]["event"] == name:
                    return self.events[-1]
        raise AssertionError(f"no {name}: {self.process.communicate()[1][-3000:]}")

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@contextmanager
def commands() -> Iterator[list[Command]]:
    started: list[Command] = []
    try:
        yield started
    finally:
        for command in started:
            command.end()


def digests(command: Command) -> list[tuple[int, str]]:
    return [
        (event["epoch"], event["digest"])
        for event in command.events
        if event["event"] == "epoch" and event["digest"]
    ]
