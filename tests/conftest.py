"""One host thread for arithmetic in every test, and in the processes that tests start.

With more, each operation is a barrier at which OpenMP's threads spin until the last one comes. On a machine
that is busy otherwise, the last one does not run: 48 steps of a tiny network, 0.1 s of work, took up to 18 s.
On a machine with a GPU nothing is changed, because work on the host is part of what is measured there.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

if "SWARM_GPU" not in os.environ or os.environ.get("SWARM_GPU_DEVICE") == "cpu":
    os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is first imported, which comes later


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Let the garbage collector look at all objects again after a test that ran a command in this process:
    what `keep_present_objects` hides from it is hidden from hypothesis, too, which then warns.
    """
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """Fail the test that leaves a log level changed: a later one in this process would miss what it logs."""
    loggers = [logging.getLogger(name) for name in ("", "averaging", "moe", "swarm")]
    before = [logging.root.manager.disable, *(one.level for one in loggers)]
    yield
    after = [logging.root.manager.disable, *(one.level for one in loggers)]
    logging.disable(before[0])
    for one, level in zip(loggers, before[1:], strict=True):
        one.setLevel(level)
    assert after == before, "use caplog.set_level"


@pytest.fixture(autouse=True)
def quick_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No work counts as long, however busy the machine is: tests compare what commands print."""
    monkeypatch.setattr("swarm.core.working.SHOWN_AFTER_S", 1e6)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of the test that this process and its children use as SWARM_HOME."""
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
