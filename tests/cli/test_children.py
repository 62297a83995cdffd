"""Child processes are read, asked to leave, and always ended. The child is `swarm bootstrap`, which needs no
torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from swarm.cli.children import Child, Children

ROOT = Path(__file__).parents[2]
ENTRY = ("bootstrap", "--listen", "127.0.0.1:0", "--identity", "new")
WAIT_S = 60.0


def listening(children: Children) -> None:
    line = children.next_line(WAIT_S)
    assert line is not None
    assert line[1] is not None, "the child ended at once"
    assert line[1]["event"] == "listening"


def until_gone(child: Child, seconds: float = 3.0) -> float:
    started_s = time.monotonic()
    child.process.wait(seconds)
    return time.monotonic() - started_s


@pytest.mark.timing
def test_no_child_survives_an_error_in_the_body() -> None:
    children = Children()
    child = children.start("entry", *ENTRY)
    listening(children)
    started_s = time.monotonic()
    with pytest.raises(ZeroDivisionError), children:
        _ = 1 / 0
    assert not child.alive
    assert child.process.returncode == 0  # it left when asked to
    assert time.monotonic() - started_s < 3.0


def test_the_files_of_a_child_are_deleted() -> None:
    with Children() as children:
        child = children.start("entry", "bootstrap", "--listen", "127.0.0.1:0")
        listening(children)
        home = Path(psutil.Process(child.process.pid).environ()["SWARM_HOME"])
        assert [file.name for file in home.iterdir() if file.suffix == ".identity"], (
            "its identity, in no folder of the user's"
        )
    assert not home.exists()


def test_a_child_leaves_when_its_parent_dies() -> None:
    with Children() as children:
        child = children.start("entry", *ENTRY)
        listening(children)
        assert child.process.stdin is not None
        child.process.stdin.close()
        until_gone(child)
        assert child.process.returncode == 0


def test_the_error_text_of_a_failed_child_is_its_last_line() -> None:
    with Children() as children:
        child = children.start("wrong", "bootstrap", "--listen", "nonsense", "--identity", "new")
        line = children.next_line(WAIT_S)
        assert line is not None
        assert line[1] is not None
        assert (line[0], line[1]["event"]) == ("wrong", "error")
        assert children.next_line(WAIT_S) == ("wrong", None)
        until_gone(child)
        assert "nonsense" in child.error_text()
        assert child.process.returncode == 2


@pytest.mark.timing
def test_a_stopped_child_is_killed() -> None:
    if os.name != "posix":
        pytest.skip("stops a process with a POSIX signal")
    with Children() as children:
        child = children.start("entry", *ENTRY)
        listening(children)
        os.kill(child.process.pid, signal.SIGSTOP)
        started_s = time.monotonic()
    assert not child.alive
    assert time.monotonic() - started_s < 3.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_a_command_cleanly(number: signal.Signals) -> None:
    with Children() as children:
        child = children.start("entry", *ENTRY)
        listening(children)
        child.process.send_signal(number)
        assert until_gone(child) < 3.0
        assert child.process.returncode == 0


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_demo_leaves_no_process_after_a_signal(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "swarm.cli", "demo", "--json", "--volunteers", "2"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert demo.stdout is not None
    try:
        for line in demo.stdout:
            event = json.loads(line)
            if event.get("from") == "volunteer 2" and event["event"] == "listening":
                break
        children = psutil.Process(demo.pid).children(recursive=True)
        assert len(children) == 3
        demo.send_signal(number)
        # After kill -9 each child has to notice by itself, which it cannot while it loads torch.
        _, left = psutil.wait_procs(children, timeout=20.0 if number == signal.SIGKILL else 3.0)
        assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
        demo.wait(3.0)
    finally:
        demo.kill()
        demo.wait()
        demo.stdout.close()
