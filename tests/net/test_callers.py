"""Open calls are counted by peer, by address prefix and in all; members are never counted with strangers."""

from __future__ import annotations

import random

import pytest

from swarm.core.ids import PeerId
from swarm.core.standing import PeerStanding
from swarm.net.callers import OpenCalls, RemoteCaller
from swarm.net.logic.stranger_budget import BudgetLimits, StrangerBudget
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


LIMITS = BudgetLimits(
    per_prefix_max=20.0,
    per_prefix_per_s=4.0,
    all_max=40.0,
    all_per_s=8.0,
    reserved=10.0,
    few_max=3.0,
    few_per_s=1.0,
)


def begun(calls: OpenCalls, peer: PeerId, prefix: str, until_s: int, method: str = "/swarm.Dht/Find") -> int:
    """Return how many of a hundred calls a second begin in this time."""
    caller = RemoteCaller(peer, prefix)
    return sum(calls.may_begin(caller, method, step / 100.0) for step in range(100 * until_s))


@pytest.mark.parametrize("identities", [1, 16])
def test_strangers_of_one_network_begin_as_many_calls_as_it_may_whatever_their_number(
    identities: int,
) -> None:
    """Regression test: a stranger could make any number of calls over its one connection."""
    calls = OpenCalls(standing(MEMBERS[0]), "calls", 1024, 256, StrangerBudget(LIMITS))
    found = sum(
        calls.may_begin(RemoteCaller(peer, PREFIXES[0]), "/swarm.Dht/Find", step / 100.0)
        for step in range(1000)
        for peer in STRANGERS[:identities]
    )
    assert 20 + 4 * 9 <= found <= 20 + 4 * 10


def test_members_experts_and_nodes_without_members_have_no_budget() -> None:
    for members, peer, method in (
        (MEMBERS, MEMBERS[0], "/swarm.Dht/Find"),
        (MEMBERS, STRANGERS[0], "/swarm.Expert/Call"),
        ((), STRANGERS[0], "/swarm.Dht/Find"),
    ):
        calls = OpenCalls(standing(*members), "calls", 1024, 256, StrangerBudget(LIMITS))
        assert begun(calls, peer, PREFIXES[0], 10, method) == 1000


def test_a_newcomer_from_elsewhere_is_served_while_other_networks_use_up_the_budget() -> None:
    calls = OpenCalls(standing(MEMBERS[0]), "calls", 1024, 256, StrangerBudget(LIMITS))
    for prefix in PREFIXES[:3]:
        begun(calls, STRANGERS[0], prefix, 1)
    assert not calls.may_begin(RemoteCaller(STRANGERS[0], PREFIXES[0]), "/swarm.Dht/Find", 1.0)
    assert [
        calls.may_begin(RemoteCaller(STRANGERS[1], PREFIXES[3]), "/swarm.Dht/Find", 1.0) for _ in range(4)
    ] == [True, True, True, False]
