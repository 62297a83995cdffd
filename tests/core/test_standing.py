"""A node knows the members of its runs; everybody else is a stranger."""

from __future__ import annotations

from swarm.core.ids import PeerId
from swarm.core.standing import MEMBERS_MAX, PeerStanding

PEERS = [PeerId(number.to_bytes(32, "big")) for number in range(MEMBERS_MAX + 1)]


def test_members_are_known_per_run_until_the_run_is_forgotten() -> None:
    standing = PeerStanding()
    anne, bert, cara = PEERS[:3]
    standing.add_members("a", [anne])
    standing.add_members("b", [bert])
    assert standing.is_member(anne)
    assert standing.is_member(anne, "a")
    assert not standing.is_member(anne, "b")
    assert not standing.is_member(cara)
    assert not standing.has_members("c")
    standing.forget_run("a")
    assert not standing.is_member(anne)
    assert standing.is_member(bert)


def test_the_member_that_was_named_longest_ago_is_forgotten_first() -> None:
    standing = PeerStanding()
    standing.add_members("a", PEERS[:MEMBERS_MAX])
    standing.add_members("a", [PEERS[0], PEERS[MEMBERS_MAX]])
    assert standing.is_member(PEERS[0])
    assert standing.is_member(PEERS[MEMBERS_MAX])
    assert not standing.is_member(PEERS[1])
    assert standing.is_member(PEERS[2])


def test_holders_of_capabilities_are_members_while_they_are_admitted() -> None:
    anne, bert, cara = PEERS[:3]
    admitted = {anne: 1.0}
    standing = PeerStanding({"a": admitted.keys()})
    standing.add_members("a", [bert])
    assert standing.has_members("a")
    assert standing.is_member(anne, "a")
    assert standing.is_member(anne)
    assert not standing.is_member(anne, "b")
    assert standing.members("a", 2) == (bert, anne)
    assert standing.members("a", 1) == (bert,)
    admitted[cara] = 2.0
    del admitted[anne]
    assert standing.is_member(cara, "a")
    assert not standing.is_member(anne, "a")
    standing.forget_run("a")
    assert standing.is_member(cara, "a")
    assert not standing.is_member(bert, "a")
