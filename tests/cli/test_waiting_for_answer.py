"""How long commands wait for the first peer to answer, on a clock of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

import swarm
from swarm.node import Node
from swarm.run.entering import wait_for_answer


class Waiting:
    """A node that nobody has answered yet, and its clock."""

    def __init__(self, *, poll_s: float, answers_s: float, is_refused: bool) -> None:
        """`poll_s`: how long each wait takes on this machine, whatever was asked for."""
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


def test_every_command_waits_for_the_first_answer_in_the_same_way() -> None:
    package = Path(swarm.__file__).parent
    callers = [path.name for path in package.rglob("*.py") if ".wait_joined" in path.read_text("utf-8")]
    assert callers == ["entering.py"]
