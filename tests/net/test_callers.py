"""Open calls are counted by peer, by address prefix and in all; members are never counted with strangers."""

from __future__ import annotations

import random

import pytest

from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding
from swarm.net.callers import OpenCalls, RemoteCaller
from swarm.testing.identities import SeededIdentity

PEERS = [SeededIdentity(number).peer_id for number in range(24)]
MEMBERS, STRANGERS = PEERS[:4], PEERS[4:]
PREFIXES = [f"192.0.{number}.0/24" for number in range(4)]


def standing(*members: PeerId) -> PeerStanding:
    known = PeerStanding()
    known.add_members("run", members)
    return known


def test_strangers_leave_half_of_the_open_calls_to_members() -> None:
    calls = OpenCalls(standing(MEMBERS[0]), "calls", 10, 4)
    refusals = [
        calls.enter(RemoteCaller(peer, f"198.51.{number}.0/24")) for number, peer in enumerate(STRANGERS)
    ]
    assert refusals.count(None) == 5
    assert set(refusals[5:]) == {"busy: strangers have 5 calls open already"}
    assert [calls.enter(RemoteCaller(MEMBERS[0], PREFIXES[0])) for _ in range(4)] == [None] * 4
    assert calls.enter(RemoteCaller(MEMBERS[0], PREFIXES[0])) == "you have 4 calls open here already"
    assert OpenCalls(standing(), "calls", 10, 4).enter(RemoteCaller(MEMBERS[0], PREFIXES[0])) is None


def test_strangers_behind_one_address_leave_room_to_strangers_elsewhere() -> None:
    for members, per_prefix in (((), 8), ((MEMBERS[0],), 4)):
        calls = OpenCalls(standing(*members), "calls", 16, 16)
        refusals = [calls.enter(RemoteCaller(peer, PREFIXES[0])) for peer in STRANGERS]
        assert refusals.count(None) == per_prefix
        assert refusals[-1] == f"busy: strangers in your network have {per_prefix} calls open already"
        assert calls.enter(RemoteCaller(STRANGERS[0], PREFIXES[1])) is None


def test_members_of_one_address_are_not_punished_for_the_strangers_beside_them() -> None:
    calls = OpenCalls(standing(*MEMBERS), "calls", 64, 8)
    for _ in range(2):
        for peer in STRANGERS:
            calls.enter(RemoteCaller(peer, PREFIXES[0]))
    assert [calls.enter(RemoteCaller(peer, PREFIXES[0])) for peer in MEMBERS for _ in range(8)] == [None] * 32
    # nor are strangers refused because members of their address are busy
    calls = OpenCalls(standing(*MEMBERS), "calls", 64, 8)
    assert [calls.enter(RemoteCaller(peer, PREFIXES[0])) for peer in MEMBERS for _ in range(8)] == [None] * 32
    assert calls.enter(RemoteCaller(STRANGERS[0], PREFIXES[0])) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_counts_agree_with_a_model(seed: int) -> None:
    rng, known = random.Random(seed), standing(*MEMBERS)
    calls, opened = OpenCalls(known, "calls", 40, 7), list[RemoteCaller]()
    for step in range(600):
        if step == 300:  # a stranger becomes a member while it has calls open
            known.add_members("run", [STRANGERS[0]])
        if opened and rng.random() < 0.4:
            calls.leave(opened.pop(rng.randrange(len(opened))))
            continue
        caller = RemoteCaller(rng.choice(PEERS), rng.choice(PREFIXES))
        of_peer = sum(one.peer_id == caller.peer_id for one in opened)
        strangers = [one for one in opened if not known.is_member(one.peer_id)]
        fits = of_peer < 7 and len(opened) < 40
        if not known.is_member(caller.peer_id):
            beside = sum(one.prefix == caller.prefix for one in strangers)
            fits = fits and len(strangers) < 20 and beside < 10
        assert (calls.enter(caller) is None) == fits
        if fits:
            opened.append(caller)
        assert calls.total == len(opened)
    for one in opened:
        calls.leave(one)
    assert calls.total == 0
    assert calls.by_peer == {}
