"""When a peer tries to punch holes: pauses, one attempt at a time, bounded memory."""

from __future__ import annotations

import itertools
import random

import pytest

from swarm.core.identity import Identity
from swarm.libp2p.logic.punching import ATTEMPTS_MAX, PEERS_MAX, SLACK_S, Punches

PEERS = [Identity.generate().peer_id for _ in range(40)]


def test_pauses_grow_with_failures_in_a_row_and_a_success_ends_them() -> None:
    punches, now_s = Punches(), 100.0
    for wait_s in (60.0, 240.0, 900.0, 900.0):
        assert punches.begin(PEERS[0], now_s, is_asked=False) == ""
        punches.end(PEERS[0], now_s + 2.5, has_worked=False)
        assert punches.next_s(PEERS[0]) == now_s + 2.5 + wait_s
        early_s = now_s + wait_s - SLACK_S - 1.0
        assert "is due in" in punches.begin(PEERS[0], early_s, is_asked=True)
        assert "is due in" in punches.begin(PEERS[0], now_s + wait_s, is_asked=False)
        now_s += 2.5 + wait_s
    assert punches.begin(PEERS[0], now_s - SLACK_S, is_asked=True) == ""  # the other end's clock
    punches.end(PEERS[0], now_s, has_worked=True)
    assert punches.begin(PEERS[0], now_s, is_asked=False) == ""


def test_attempts_are_limited_of_a_peer_and_in_all() -> None:
    punches = Punches()
    for peer_id in PEERS[:ATTEMPTS_MAX]:
        assert punches.begin(peer_id, 0.0, is_asked=True) == ""
    assert "another attempt" in punches.begin(PEERS[0], 1e6, is_asked=True)
    assert f"{ATTEMPTS_MAX} attempts" in punches.begin(PEERS[-1], 0.0, is_asked=True)
    punches.give_way(PEERS[0])
    assert punches.begin(PEERS[0], 0.0, is_asked=True) == ""


@pytest.mark.parametrize("seed", range(20))
def test_no_peer_is_dialed_more_than_once_in_half_a_minute_for_any_requester(seed: int) -> None:
    rng, punches, now_s = random.Random(seed), Punches(), 0.0
    begun: dict[object, list[float]] = {}
    for _ in range(400):
        now_s += rng.expovariate(1.0)
        peer_id = rng.choice(PEERS[:5])
        if not punches.begin(peer_id, now_s, is_asked=rng.random() < 0.5):
            begun.setdefault(peer_id, []).append(now_s)
            punches.end(peer_id, now_s, has_worked=False)
    for times in begun.values():
        pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert all(pause >= (60.0, 240.0, 900.0)[min(n, 2)] - SLACK_S for n, pause in enumerate(pauses))


def test_peers_that_were_tried_long_ago_are_forgotten() -> None:
    punches = Punches()
    for _ in range(PEERS_MAX + 1):
        stranger = Identity.generate().peer_id
        assert punches.begin(stranger, 0.0, is_asked=True) == ""
        punches.end(stranger, 0.0, has_worked=False)
    assert punches.begin(stranger, 0.0, is_asked=True)
    assert len(punches.remembered) == PEERS_MAX
