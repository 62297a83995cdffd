"""The seats of the electors' cell: electors have one, free ones go to the same peers in everybody's view."""

from __future__ import annotations

from dataclasses import replace

import pytest
from blake3 import blake3

from averaging.history.chain import Chain
from averaging.history.electors import Register
from averaging.optim.seats import SwarmSize
from swarm.core.ids import PeerId
from swarm.testing.identities import SeededIdentity

PEERS = [SeededIdentity(number).peer_id for number in range(48)]
GROUP_SIZE = 8


def root(seed: int, electors: list[PeerId], rounds: int = 1) -> Chain:
    head = blake3(seed.to_bytes(4, "little")).digest()
    return Chain(head=head, electors=tuple(electors), certificates=(), root_grid_rounds=rounds)


def seated(peers: list[PeerId], head: Chain, *, parts: int = 1, is_break: bool = False) -> dict[PeerId, int]:
    """Return the peers with a seat, and how many each expects. A peer knows its part of the swarm only."""
    found = {}
    for place, own in enumerate(peers):
        size = SwarmSize(own, GROUP_SIZE)
        size.update(len(peers), [one for one in peers[place % parts :: parts] if one != own])
        found[own] = size.seats(head, is_break=is_break)
    return {peer: expected for peer, expected in found.items() if expected}


@pytest.mark.parametrize("seed", range(20))
def test_free_seats_are_filled_and_all_peers_expect_as_many(seed: int) -> None:
    for count in range(GROUP_SIZE + 1):
        electors = PEERS[:count]
        found = seated(PEERS, root(seed, electors))
        assert {*electors} <= found.keys()
        assert len(found) == GROUP_SIZE
        assert set(found.values()) == {GROUP_SIZE}


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_a_large_swarm_never_fill_more_than_the_free_seats(seed: int) -> None:
    for count in range(1, GROUP_SIZE + 1):
        found = seated(PEERS, root(seed, PEERS[:count]), parts=3)
        assert {*PEERS[:count]} <= found.keys()
        assert len(found) <= GROUP_SIZE
    assert seated(PEERS, root(seed, []), parts=3), "somebody begins"


def test_electors_that_are_gone_lose_their_seats_only_in_a_break() -> None:
    gone, here = PEERS[:GROUP_SIZE], PEERS[GROUP_SIZE:]
    head = root(1, gone)
    assert not seated(here, head)
    assert len(seated(here, head, is_break=True)) == GROUP_SIZE


def test_an_elector_that_missed_the_last_certificate_is_expected_only_if_it_is_there() -> None:
    electors = PEERS[:4]
    head = replace(root(1, electors), root_register=Register(at_once=0, misses=(1, 0, 0, 0)))
    assert seated(PEERS[:6], head) == dict.fromkeys(PEERS[:6], 6)
    assert seated(PEERS[1:6], head) == dict.fromkeys(PEERS[1:6], 5), "nobody waits for the first one"


def test_a_small_swarm_seats_everybody() -> None:
    assert seated(PEERS[:5], root(1, PEERS[:2])) == dict.fromkeys(PEERS[:5], 5)


def test_the_certificate_says_how_many_rounds_an_epoch_has() -> None:
    size = SwarmSize(PEERS[0], GROUP_SIZE)
    assert size.rounds(root(1, [])) == 1
    size.update(GROUP_SIZE**2, [])
    assert size.rounds_wanted == 2
    assert size.rounds(root(1, [], rounds=1)) == 2, "it has outgrown its group"
    size.update(GROUP_SIZE**3, [])
    assert size.rounds(root(1, [], rounds=2)) == 2
    assert size.rounds_wanted == 3
