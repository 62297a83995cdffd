"""The search for relays: which peers are asked when."""

from __future__ import annotations

import itertools
import random

import pytest

from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact
from swarm.net.logic.relay_search import ASKED_MAX, RelaySearch

PEERS = [Contact(Identity.generate().peer_id, (Address(f"203.0.{n}.1", 4000),)) for n in range(10)]


def test_the_first_candidates_are_asked_first_and_then_the_others() -> None:
    search = RelaySearch()
    assert search.due(PEERS, 0.0) == PEERS[:ASKED_MAX]
    assert search.due(PEERS, 0.0) == [], "a round at a time"
    assert search.due(PEERS, search.wait_s(0.0)) == PEERS[ASKED_MAX : 2 * ASKED_MAX]


@pytest.mark.parametrize("seed", range(8))
def test_no_peer_is_asked_twice_in_five_seconds_and_pauses_grow_up_to_a_minute(seed: int) -> None:
    rng = random.Random(seed)
    search, now_s, asked_s = RelaySearch(), 0.0, dict[Contact, float]()
    rounds = list[float]()
    while now_s < 1200.0:
        candidates = rng.sample(PEERS, rng.randrange(len(PEERS) + 1))
        due = search.wait_s(now_s) == 0.0
        for peer in search.due(candidates, now_s):
            assert peer in candidates
            assert now_s - asked_s.get(peer, -60.0) >= 5.0
            asked_s[peer] = now_s
        rounds += [now_s] if due else []
        now_s += max(search.wait_s(now_s), rng.random())
    pauses = [after - before for before, after in itertools.pairwise(rounds)]
    assert 15 <= len(rounds) <= 40
    assert max(pauses) < 63.0
    assert pauses[0] < 5.0


def test_a_search_that_begins_again_asks_at_once() -> None:
    search = RelaySearch()
    search.due(PEERS[:1], 0.0)
    assert search.due(PEERS, 0.5) == []
    search.restart()
    assert search.due(PEERS, 0.5) == PEERS[1 : 1 + ASKED_MAX]


def test_the_only_candidate_is_asked_again_within_seconds_because_it_may_relay_by_then() -> None:
    search, asked_s = RelaySearch(), list[float]()
    for now_s in range(31):
        asked_s += [float(now_s) for _ in search.due(PEERS[:1], float(now_s))]
    assert len(asked_s) >= 3
    assert asked_s[1] < 10.0
