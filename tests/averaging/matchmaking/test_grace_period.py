"""The cost of waiting for late peers: plays of many epochs without a network."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from averaging.matchmaking.logic.grace_period import GracePeriod
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId

SHARE = 0.1
UNKNOWN_PEER_S = 5.0


def bounded() -> GracePeriod:
    """Return grace periods whose sum is bounded."""
    return GracePeriod(30.0, unknown_peer_s=UNKNOWN_PEER_S, waiting_share_max=SHARE)


def peer(number: int) -> PeerId:
    return PeerId(bytes([number]) * 32)


@dataclass
class Play:
    """One peer that looks for a group after every epoch; the others come late, or not at all (infinity)."""

    period: GracePeriod
    now_s: float = 100.0
    waited_s: float = 0.0
    left_out: dict[PeerId, int] = field(default_factory=dict)

    def epoch(self, seconds: float, late_s: dict[PeerId, float]) -> float:
        """Train for an epoch and wait for the others. Return how long that took."""
        self.now_s += seconds
        self.period.pay(self.now_s)
        came, wait_s = set[PeerId](), 0.0
        for one, late in sorted(late_s.items(), key=lambda item: item[1]):
            missing = set(late_s) - came
            if late > max(self.period.grace_s(other) for other in missing):
                wait_s = max(wait_s, *(self.period.grace_s(other) for other in missing))
                break
            self.period.record_arrival(one, late)
            came.add(one)
            wait_s = late
        self.period.charge({one: min(late, wait_s) for one, late in late_s.items()})
        for one in set(late_s) - came:
            self.period.record_miss(one)
            self.left_out[one] = self.left_out.get(one, 0) + 1
        self.now_s += wait_s
        self.waited_s += wait_s
        return wait_s


@pytest.mark.parametrize("seed", range(20))
def test_waiting_takes_at_most_its_share_and_punctual_peers_are_never_left_out(seed: int) -> None:
    rng = random.Random(seed)
    play = Play(bounded())
    epoch_s = rng.choice([0.5, 2.0, 20.0, 200.0])
    punctual = [peer(number) for number in range(1, 1 + rng.randrange(1, 5))]
    slow = [peer(number) for number in range(10, 10 + rng.randrange(1, 5))]
    began_s = play.now_s
    for _ in range(400):
        late_s = {one: rng.random() * 0.02 * epoch_s for one in punctual}
        for one in slow:
            late_s[one] = float("inf") if rng.random() < 0.3 else rng.random() * 4 * epoch_s
        play.epoch(epoch_s * (0.8 + 0.4 * rng.random()), late_s)
    assert not set(punctual) & set(play.left_out)
    advance_s = UNKNOWN_PEER_S * len(punctual + slow)
    assert play.waited_s <= min(len(slow), 3) * SHARE * (play.now_s - began_s) + advance_s


def test_a_peer_that_never_comes_costs_little_after_its_first_rounds() -> None:
    play = Play(bounded())
    for _ in range(20):
        play.epoch(1.0, {peer(1): 0.01, peer(2): float("inf")})
    assert play.waited_s < 11.0
    assert sum(play.epoch(1.0, {peer(1): 0.01, peer(2): float("inf")}) for _ in range(20)) < 0.25


def test_a_peer_within_the_budget_is_waited_for_every_time() -> None:
    play = Play(bounded())
    for _ in range(200):
        play.epoch(1.0, {peer(1): 0.0, peer(2): 0.08})
    assert not play.left_out


def test_a_wait_is_charged_to_those_who_were_missing_and_to_nobody_else() -> None:
    period = bounded()
    period.pay(0.0)
    for number in (1, 2, 3):
        period.record_arrival(peer(number), 9.0)
    period.charge({peer(1): 0.3, peer(2): 1.3, peer(3): 1.3})
    accounts = [period.grace_s(peer(number)) for number in (1, 2, 3)]
    assert accounts == pytest.approx([4.9, 4.4, 4.4])
    period.pay(3.0)
    accounts = [period.grace_s(peer(number)) for number in (1, 2, 3)]
    assert accounts == pytest.approx([5.0, 4.7, 4.7]), "a tenth of three seconds each, until it is full"


def test_many_late_peers_share_three_payments() -> None:
    period = bounded()
    period.pay(0.0)
    for number in range(6):
        period.record_arrival(peer(number), 9.0)
    period.charge({peer(number): 5.0 for number in range(6)})
    assert [period.grace_s(peer(number)) for number in range(6)] == pytest.approx([5.0 - 5.0 / 6] * 6)
    for _ in range(6):
        period.charge({peer(number): 5.0 for number in range(6)})
    before = [period.grace_s(peer(number)) for number in range(6)]
    period.pay(2.0)
    paid = [period.grace_s(peer(number)) - old for number, old in zip(range(6), before, strict=True)]
    assert paid == pytest.approx([0.1] * 6), "three tenths of two seconds for six"


@pytest.mark.parametrize("seed", range(10))
def test_peers_of_similar_speed_with_long_steps_are_always_waited_for(seed: int) -> None:
    """Each is late by the rest of a step that takes a quarter of an epoch."""
    rng, play = random.Random(seed), Play(bounded())
    for _ in range(400):
        play.epoch(4.0, {peer(number): rng.random() for number in range(5)})
    assert not play.left_out


def test_without_a_share_waiting_is_not_bounded() -> None:
    play = Play(GracePeriod())
    for _ in range(20):
        assert play.epoch(1.0, {peer(1): 2.0}) == 2.0
    assert not play.left_out


@pytest.mark.parametrize("share", [0.0, -0.1, 1.5])
def test_a_share_outside_of_its_range_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="waiting_share_max"):
        GracePeriod(waiting_share_max=share)
