"""The peers that a peer passes news to, and that news reaches everybody."""

from __future__ import annotations

import math
import random

import pytest

from averaging.optim.progress.logic.relays import ALL_MAX, relays
from swarm.core.ids import PeerId


def peers_of(count: int, seed: int) -> list[PeerId]:
    chance = random.Random(seed)
    return [PeerId(chance.randbytes(32)) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, ALL_MAX, ALL_MAX + 1])
def test_in_a_small_run_all_are_told(count: int) -> None:
    own, *others = peers_of(count, 1)
    assert set(relays(own, others)) == set(others)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [10, 17, 33, 64, 100])
def test_news_reaches_everybody_in_few_hops_and_messages(count: int, seed: int) -> None:
    peers = peers_of(count, seed)
    told, latest, hops = {peers[0]}, {peers[0]}, 0
    while latest:
        assert all(len(relays(peer, peers)) <= math.log2(count) + 1 for peer in latest)
        assert all(peer not in relays(peer, peers) for peer in latest)
        latest = {other for peer in latest for other in relays(peer, peers)} - told
        told |= latest
        hops += bool(latest)
    assert told == set(peers)
    assert hops <= math.log2(count) + 1


@pytest.mark.parametrize("seed", range(5))
def test_news_passes_failed_peers(seed: int) -> None:
    peers = peers_of(40, seed)
    dead = set(random.Random(seed).sample(peers[1:], 4))
    told, latest = {peers[0]}, {peers[0]}
    while latest:
        latest = {other for peer in latest for other in relays(peer, peers)} - told - dead
        told |= latest
    assert told == set(peers) - dead
