"""Contacts on the wire and in records: own addresses, and relays through which a peer takes calls."""

from __future__ import annotations

import pytest

from swarm.core.errors import PeerError
from swarm.core.identity import Identity
from swarm.core.ids import ADDRESSES_MAX, RELAYS_MAX, Address, Contact
from swarm.net.contacts import contact_from_wire, contact_to_wire
from swarm.wire.peer_pb2 import Contact as WireContact

PEER = Identity.generate().peer_id
RELAYS = tuple(
    Contact(Identity.generate().peer_id, (Address(host, 4001),))
    for host in ("203.0.113.7", "2001:db8::7", "198.51.100.7", "192.0.2.7")
)
OWN = tuple(Address(f"203.0.113.{number}", 4000) for number in range(1, ADDRESSES_MAX + 1))


@pytest.mark.parametrize("addresses", [(), OWN[:1], OWN[:5]])
@pytest.mark.parametrize("relays", [(), RELAYS[:1], RELAYS[:3]])
def test_a_contact_is_the_same_after_the_wire_and_after_a_record(
    addresses: tuple[Address, ...], relays: tuple[Contact, ...]
) -> None:
    contact = Contact(PEER, addresses, relays)
    assert contact_from_wire(contact_to_wire(contact)) == contact
    assert Contact.from_record(PEER, contact.published) == contact
    assert contact.is_callable == bool(addresses or relays)


def test_a_record_of_many_addresses_keeps_the_relays() -> None:
    published = Contact(PEER, OWN, RELAYS[:2]).published
    assert len(published) == ADDRESSES_MAX
    assert Contact.from_record(PEER, published).relays == RELAYS[:2]


def test_members_with_an_address_leave_calls_through_relays_to_the_hidden_ones() -> None:
    direct, hidden, client = Contact(PEER, OWN[:1]), Contact(PEER, (), RELAYS[:1]), Contact(PEER)
    assert direct.is_called_by(direct)
    assert direct.is_called_by(client)
    assert hidden.is_called_by(hidden)
    assert hidden.is_called_by(client)
    assert not hidden.is_called_by(direct)
    assert not client.is_called_by(hidden)


def test_relays_beyond_the_limit_and_the_peer_itself_as_relay_are_left_out() -> None:
    texts = [text for one in RELAYS for text in Contact(PEER, (), (one,)).published]
    own = Contact(Identity.generate().peer_id, (), (Contact(PEER, OWN[:1]),)).published
    assert Contact.of_published(PEER, [*own, *texts]).relays == RELAYS[:RELAYS_MAX]


@pytest.mark.parametrize(
    "text",
    [
        "/p2p-circuit",
        "/ip4/203.0.113.7/tcp/4001/p2p-circuit",
        "/ip4/203.0.113.7/tcp/4001/p2p/nobody/p2p-circuit",
        f"/ip4/203.0.113.7/tcp/0/p2p/{PEER}/p2p-circuit",
        f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}/p2p-circuit/p2p-circuit",
        f"/p2p/{PEER}/p2p-circuit",
    ],
    ids=["no-relay", "no-peer-id", "no-such-peer-id", "port-0", "through-two", "no-address"],
)
def test_malformed_relays_are_refused_in_a_record_and_ignored_on_the_wire(text: str) -> None:
    with pytest.raises(PeerError):
        Contact.from_record(PEER, [text])
    message = WireContact(peer_id=PEER.to_bytes(), addresses=[text, OWN[0].multiaddr])
    assert contact_from_wire(message) == Contact(PEER, OWN[:1])
