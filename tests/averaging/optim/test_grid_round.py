"""The rounds of one epoch through the cells of the grid: which failures end it, and when a search ends."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from averaging.history.certificate import RoundKind
from averaging.optim.grid_round import GridRound
from averaging.result import RoundFailure, RoundResult
from swarm.runtime.waits import ThreadWaits
from swarm.testing.identities import SeededIdentity

GRACE_S = 5.0
ROUNDS = 3
OWN = SeededIdentity(1).peer_id


class Pending:
    """A round of a cell that ends when the test says so."""

    def __init__(self, key: str, weight: float) -> None:
        self.key, self.weight, self.done, self.cancelled = key, weight, False, False
        self.result = RoundResult(failed=True, reason="cancelled")

    def end(self, reason: RoundFailure = "", *, unresolved: bool = False) -> None:
        self.done = True
        self.result = RoundResult(failed=bool(reason), reason=reason, weight=1.0, unresolved=unresolved)

    def cancel(self) -> None:
        self.cancelled = True

    def wait_given_up(self, timeout_s: float) -> None:
        """Nothing is to be waited for."""


@dataclass
class History:
    """A history whose epoch has several rounds. This peer has no seat among the electors."""

    ahead: Any = None
    grid_rounds: int = ROUNDS
    is_break: bool = False
    head: bytes = b"h" * 32
    certified_epoch: int = 4
    root: Any = field(default_factory=lambda: SimpleNamespace(electors=()))
    abstains: bool = False

    def round_key(self, epoch: int, part: str) -> str:
        return part

    def seats(self) -> int:
        return 0


@dataclass
class Scene:
    """A grid's round with what is around it."""

    now_s: float = 0.0
    runner: Any = field(default_factory=lambda: SimpleNamespace(in_round=False, unresolved=False))
    history: Any = field(default_factory=History)
    begun: list[Pending] = field(default_factory=list)

    def begin(self, *, may_have_counted: bool = False) -> GridRound:
        node = SimpleNamespace(
            clock=SimpleNamespace(monotonic_s=lambda: self.now_s),
            network=SimpleNamespace(waits=ThreadWaits()),
            rng=random.Random(1),
            peer_id=OWN,
        )

        def step(key: str, weight: float, gather: Any) -> Pending:
            self.begun.append(Pending(key, weight))
            return self.begun[-1]

        plan: Any = SimpleNamespace(
            averager=SimpleNamespace(node=node, runner=self.runner, met=[]),
            kind=RoundKind.EPOCH,
            epoch=3,
            epoch_after=4,
            weight=1.0,
            gather=None,
            timeout_s=60.0,
            may_have_counted=may_have_counted,
            merge=lambda _: None,
            take=lambda pending: pending.result,
            step=step,
        )
        return GridRound(plan, self.history, lambda: False, GRACE_S)

    def certify(self) -> None:
        """Let this peer learn of the electors' certificate for the epoch."""
        certificate = SimpleNamespace(proposal=SimpleNamespace(is_break=False))
        self.history.ahead = SimpleNamespace(extending=lambda *_: certificate)


@pytest.mark.parametrize("reason", ["deadline", "round", "few"])
def test_the_first_round_can_be_repeated_as_long_as_nobody_says_that_it_is_over(reason: RoundFailure) -> None:
    """Nothing has changed yet, so the epoch ends here and its first round is tried again."""
    scene = Scene()
    epoch = scene.begin()
    scene.begun[0].end(reason)
    assert epoch.done()
    assert [one.key for one in scene.begun] == ["1/3"]


def test_a_first_round_that_others_have_finished_is_left_out() -> None:
    scene = Scene()
    epoch = scene.begin()
    scene.begun[0].end("passed")
    assert not epoch.done()
    assert [one.key for one in scene.begun] == ["1/3", "2/3"]


@pytest.mark.parametrize("unresolved", [False, True])
@pytest.mark.parametrize("failing", [1, 2])
def test_values_that_the_cell_has_committed_without_this_peer_do_not_count_again_in_the_next_one(
    failing: int, unresolved: bool
) -> None:
    """Regression test: a peer that had voted for a round, and found its cell in the next one, brought what
    was in the cell's average to the next cell, too.
    """
    scene = Scene()
    epoch = scene.begin()
    for number in range(1, failing + 1):
        scene.begun[-1].end("passed" if number == failing else "", unresolved=unresolved)
        assert not epoch.done()
    assert [one.weight for one in scene.begun] == [1.0] * failing + [0.0 if unresolved else 1.0]


@pytest.mark.parametrize("may_have_counted", [False, True])
@pytest.mark.parametrize("passed", [1, 2])
def test_values_that_the_first_cell_has_committed_in_an_earlier_attempt_do_not_count_again(
    passed: int, may_have_counted: bool
) -> None:
    """Regression test: only the attempt that had voted itself left its weight out of the next cell; the next
    one, which found that the others had finished the round, brought it there once more.
    """
    scene = Scene()
    epoch = scene.begin(may_have_counted=may_have_counted)
    for number in range(1, passed + 1):
        scene.begun[-1].end("passed" if number == passed else "")
        assert not epoch.done()
    is_again = may_have_counted and passed == 1
    assert [one.weight for one in scene.begun] == [1.0] * passed + [0.0 if is_again else 1.0]


@pytest.mark.parametrize("unresolved", [False, True])
def test_an_epoch_without_an_average_says_that_its_first_cell_may_have_counted_this_peer(
    unresolved: bool,
) -> None:
    scene = Scene()
    epoch = scene.begin()
    scene.begun[0].end("passed", unresolved=unresolved)
    assert not epoch.done()
    scene.certify()
    scene.begun[1].end("passed")
    assert epoch.result().failed
    assert epoch.result().unresolved is unresolved


@pytest.mark.parametrize("unresolved", [False, True])
def test_a_search_after_a_round_that_others_may_have_committed_says_so(unresolved: bool) -> None:
    scene = Scene()
    epoch, scene.runner.unresolved = scene.begin(), unresolved
    scene.certify()
    assert not epoch.done()
    scene.now_s = GRACE_S
    assert epoch.result().reason == "passed"
    assert epoch.result().unresolved is unresolved


@pytest.mark.parametrize("failing", [2, 3])
@pytest.mark.parametrize("first", ["", "passed"])
def test_no_later_round_is_repeated(failing: int, first: RoundFailure) -> None:
    """The members of a later cell have other values by then, those of this peer are in the earlier ones."""
    scene = Scene()
    epoch = scene.begin()
    for number in range(1, ROUNDS + 1):
        scene.begun[-1].end(first if number == 1 else "deadline" if number == failing else "")
        assert not epoch.done(), "it waits for the electors"
    assert [one.key for one in scene.begun] == ["1/3", "2/3", "3/3"]


def test_a_search_ends_some_seconds_after_the_epochs_certificate_is_known() -> None:
    scene = Scene()
    epoch = scene.begin()
    scene.begun[0].end()
    assert not epoch.done()
    scene.certify()
    assert not epoch.done()
    scene.now_s = GRACE_S - 0.1
    assert not epoch.done()
    scene.now_s = GRACE_S
    assert epoch.done()
    assert scene.begun[-1].cancelled


def test_a_group_that_counts_on_this_peer_is_not_left_because_of_the_certificate() -> None:
    """The other members would have to repair what this peer reduces."""
    scene = Scene()
    epoch, scene.runner.in_round = scene.begin(), True
    scene.certify()
    assert not epoch.done()
    scene.now_s = 3 * GRACE_S
    assert not epoch.done()
    scene.runner.in_round = False
    assert epoch.done()
