"""How long commands wait for the first peer to answer, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import swarm
from swarm.cli.finding import announce_by_name
from swarm.core.errors import DeadlineExceeded, NetworkError
from swarm.node import Node
from swarm.run.directory import RunDirectory
from swarm.run.entering import found_run, wait_for_answer
from swarm.run.signed import SignedSpecification
from swarm.testing.virtual_loop import run_virtual


class Waiting:
    """A node that nobody has answered yet, and its clock."""

    def __init__(self, *, poll_s: float, answers_s: float, is_refused: bool) -> None:
        """`poll_s`: duration of each wait on this machine, regardless of the requested time."""
        self.now_s, self._poll_s, self._answers_s = 0.0, poll_s, answers_s
        self.join_refused = is_refused

    def wait_joined(self, timeout_s: float) -> bool:
        """Let time pass, and return whether somebody has answered."""
        self.now_s += self._poll_s
        return self.now_s >= self._answers_s


@pytest.mark.parametrize(
    ("poll_s", "answers_s", "is_refused", "answered", "at_most_s"),
    [
        (0.5, 7.0, False, True, 8.0),  # the first Hello got no answer in time, the second did
        (4.0, 40.0, False, True, 41.0),  # a machine that is so busy that nothing runs for seconds
        (0.5, 1e9, False, False, 20.0),
        (0.5, 1e9, True, False, 3.0),
    ],
    ids=["late", "busy", "silent", "refused"],
)
def test_a_peer_that_may_still_answer_is_waited_for_and_one_that_refuses_is_not(
    poll_s: float,
    answers_s: float,
    is_refused: bool,
    answered: bool,
    at_most_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Waiting(poll_s=poll_s, answers_s=answers_s, is_refused=is_refused)
    monkeypatch.setattr("swarm.run.entering.time.monotonic", lambda: node.now_s)
    assert wait_for_answer(cast(Node, node)) is answered
    assert node.now_s <= at_most_s


class BusyDirectory:
    """A directory whose reads fail a number of times, because the peer that is asked is busy."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    async def find(self, wanted: str | None, *, grid: bool) -> str:
        """Return the run that is wanted."""
        self.failures -= 1
        if self.failures >= 0:
            raise NetworkError("none of the 1 peers asked for public/runs answered, all failed or refused")
        return f"run {wanted}"


@pytest.mark.parametrize(("failures", "is_found"), [(0, True), (2, True), (3, False)])
def test_a_run_is_looked_for_again_when_a_busy_peer_does_not_answer(failures: int, is_found: bool) -> None:
    find = found_run(cast(RunDirectory, BusyDirectory(failures)), "tiny")
    with contextlib.nullcontext() if is_found else pytest.raises(NetworkError, match="all failed or refused"):
        assert run_virtual(find) == "run tiny"


class SlowNetwork:
    """A network thread that gets a turn after 40 s only."""

    def __init__(self) -> None:
        self.turns = 0

    def run(self, coroutine: Coroutine[Any, Any, None], timeout_s: float | None = None) -> None:
        """Run a coroutine, if the caller is patient."""
        if timeout_s is not None and timeout_s < 40.0:
            coroutine.close()
            raise DeadlineExceeded(f"no result within {timeout_s:g} s")
        asyncio.run(coroutine)
        self.turns += 1


def test_a_busy_machine_does_not_end_a_command_that_begins_to_announce_its_run() -> None:
    network = SlowNetwork()
    supervisor = SimpleNamespace(spawn=lambda name, begin, **options: None)
    node = SimpleNamespace(network=network, supervisor=supervisor)
    signed = SimpleNamespace(full_name="tiny@id", name="tiny", run_id="id")
    announce_by_name(cast(Node, node), cast(SignedSpecification, signed), [], lambda event: None)
    assert network.turns == 1


def test_every_command_waits_for_the_first_answer_in_the_same_way() -> None:
    package = Path(swarm.__file__).parent
    callers = [path.name for path in package.rglob("*.py") if ".wait_joined" in path.read_text("utf-8")]
    assert callers == ["entering.py"]
