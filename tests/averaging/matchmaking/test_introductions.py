"""Records of strangers do not keep a peer from introducing itself to the members of its run."""

from __future__ import annotations

from averaging.matchmaking.logic.asking import FIRST_MAX
from averaging.matchmaking.logic.messages import Holder
from averaging.matchmaking.logic.peer_table import QUERIED_PEERS_MAX
from averaging.matchmaking.service.matchmaking_service import introduced
from swarm.core.ids import Address, Contact, PeerId
from swarm.testing.identities import SeededIdentity

SCHEMA = b"schema"


def holder(number: int, schema: bytes = SCHEMA) -> Holder:
    peer_id = SeededIdentity(number).peer_id
    return Holder(contact=Contact(peer_id, (Address("198.51.100.1", 4000),)), schema=schema, schema_text="")


def test_members_come_before_any_number_of_strangers_with_the_same_tensors() -> None:
    strangers = [holder(number) for number in range(QUERIED_PEERS_MAX)]
    others = [holder(number, b"another") for number in range(1000, 1010)]
    members = [holder(number) for number in range(2000, 2004)]
    known = {one.contact.peer_id for one in members}
    found = introduced(
        [*others, *strangers, *members], members[0].contact.peer_id, SCHEMA, known.__contains__
    )
    assert len(found) == FIRST_MAX, "of many newcomers not each introduces itself to each: members lead"
    assert found[:3] == [one.contact for one in members[1:]]
    assert not {one.contact for one in others} & set(found)


def test_without_members_a_peer_introduces_itself_to_all() -> None:
    strangers = [holder(number) for number in range(QUERIED_PEERS_MAX + 1)]
    own = strangers[0].contact.peer_id
    found = introduced(strangers, own, SCHEMA, frozenset[PeerId]().__contains__)
    assert len(found) == QUERIED_PEERS_MAX
