"""Rounds that run while training continues: how often they check whether they are obsolete."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from averaging.optim.background_round import BackgroundRound, check_interval_s

GRACE_S = 0.5


class Polled:
    """A round that never ends by itself, and a trainer that looks at it every hundredth of a second."""

    def __init__(self, peers: int) -> None:
        self.now_s, self.checks, self.is_obsolete = 0.0, 0, False
        pending: Any = SimpleNamespace(done=False, cancel=lambda: None)
        clock: Any = SimpleNamespace(monotonic_s=lambda: self.now_s)
        self.round = BackgroundRound(
            pending, self._check, GRACE_S, clock, lambda ended: ended.result(), check_interval_s(peers)
        )

    def _check(self) -> bool:
        self.checks += 1
        return self.is_obsolete

    def poll(self, seconds: float) -> bool:
        """Look for this time, or until the round is given up; return whether it is."""
        for _ in range(round(100 * seconds)):
            if self.round.done():
                return True
            self.now_s += 0.01
        return False


@pytest.mark.parametrize(("peers", "checks_max"), [(2, 25), (8, 25), (33, 7), (1000, 4)])
def test_a_round_of_many_peers_checks_less_often_whether_it_is_obsolete(peers: int, checks_max: int) -> None:
    polled = Polled(peers)
    assert not polled.poll(1.0)
    assert 0.75 * checks_max <= polled.checks <= checks_max


@pytest.mark.parametrize("peers", [2, 33, 1000])
def test_an_obsolete_round_is_given_up_after_the_grace_in_a_swarm_of_any_size(peers: int) -> None:
    polled = Polled(peers)
    polled.poll(1.0)
    polled.is_obsolete = True
    assert polled.poll(2.0)
    assert GRACE_S <= polled.now_s - 1.0 <= GRACE_S + 0.32
