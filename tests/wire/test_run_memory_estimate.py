"""The memory estimate of a volunteer is compared with the peak of its process, in a real run of two
processes.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# 22.6 MB: large enough to stand out from the memory of an idle process
PARAMETERS = 5_651_968
RUN = """
name = "memory"
target_batch_size = 8
batch_size = 2
state_sync_epochs = 2
task = {name = "bytelm", settings = {width = 256, layers = 7, heads = 4, context = 32, data_bytes = 1048576}}
"""
TOGETHER = 3  # epochs of both volunteers: rounds over gradients or differences, and one over the state
TIMEOUT_S = 120.0


class Volunteer:
    """A `swarm` command in another process, and the events that it prints."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "swarm.cli",
            *arguments,
            "--device",
            "cpu",
            "--listen",
            "127.0.0.1:0",
            "--json",
        ]
        environment = {
            "SWARM_HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put({"event": "gone"})

    def wait(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Return the next event of this kind with these fields."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            event = self._lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            assert event["event"] not in ("gone", "error"), event
            if event["event"] == kind and all(event[name] == value for name, value in fields.items()):
                return event

    def end(self) -> dict[str, Any]:
        """Ask the volunteer to leave, and return its summary."""
        self.process.terminate()
        finished = self.wait("finished")
        self.process.wait(30)
        return finished


@contextmanager
def two_volunteers(folder: Path, settings: str) -> Iterator[tuple[Volunteer, Volunteer]]:
    (folder / "run.toml").write_text(settings + RUN)
    started = [
        Volunteer(
            folder / "home",
            "start",
            str(folder / "run.toml"),
            "--identity",
            "new",
            "--checkpoint-every",
            "1s",
        )
    ]
    try:
        address = started[0].wait("listening")["invite"]
        assert started[0].wait("run")["parameters"] == PARAMETERS
        started.append(Volunteer(folder / "home", "join", address, "--yes"))
        yield started[0], started[1]
    finally:
        for one in started:
            one.process.kill()
            one.process.wait()
            if one.process.stdout is not None:
                one._reader.join()
                one.process.stdout.close()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param('mode = "gradients"', id="gradients"),
        pytest.param('mode = "diloco"', id="diloco"),
        pytest.param('mode = "gradients"\ncodec = "int8"\nerror_feedback = true', id="error feedback"),
    ],
)
def test_the_peak_of_a_process_is_below_its_estimate_but_not_far_below(settings: str, tmp_path: Path) -> None:
    with two_volunteers(tmp_path, settings) as volunteers:
        for one in volunteers:
            for _ in range(TOGETHER):
                one.wait("epoch", peers=2)
        reports = [one.end() for one in reversed(volunteers)]
    for report in reports:
        estimated, taken = report["memory_bytes"], report["memory_peak_bytes"]
        assert taken <= estimated <= 2.5 * taken, report
