"""Which relays a node dials, and at which of their addresses."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from swarm.core.clock import SystemClock
from swarm.core.errors import NetworkError
from swarm.core.ids import Address, Contact
from swarm.core.standing import PeerStanding
from swarm.net.scope import Surroundings
from swarm.reach.on_demand import Libp2p
from swarm.testing.identities import SeededIdentity

OWN, PEER, RELAY = (SeededIdentity(number) for number in range(3))
PUBLIC, LAN, HERE = (Address(host, 4001) for host in ("9.9.9.9", "192.168.1.7", "127.0.0.1"))


def libp2p(*entered_by: str) -> Libp2p:
    """Return the libp2p of a node that entered by peers at these addresses; it is not loaded."""
    surroundings = Surroundings()
    surroundings.widen(entered_by)
    return Libp2p(OWN, "test/1", SystemClock(), PeerStanding(), surroundings, ThreadPoolExecutor(1))


@pytest.mark.parametrize(
    ("entered_by", "dialed"),
    [("127.0.0.1", [PUBLIC, LAN, HERE]), ("192.168.1.1", [PUBLIC, LAN]), ("8.8.8.8", [PUBLIC])],
    ids=["machine", "lan", "internet"],
)
def test_relays_are_dialed_in_the_network_that_the_node_is_in(entered_by: str, dialed: list[Address]) -> None:
    relay = Contact(RELAY.peer_id, (PUBLIC, LAN, HERE))
    assert libp2p(entered_by).dialable([relay]) == [Contact(RELAY.peer_id, tuple(dialed))]


def test_relays_without_dialable_addresses_and_the_node_itself_are_left_out() -> None:
    near, own = Contact(RELAY.peer_id, (LAN,)), Contact(OWN.peer_id, (PUBLIC,))
    assert libp2p("8.8.8.8").dialable([near, own]) == []
    assert libp2p("8.8.8.8").dialable([]) == []


def test_a_peer_with_no_relay_that_may_be_dialed_is_refused_without_loading_libp2p() -> None:
    async def scenario() -> None:
        node = libp2p("8.8.8.8")
        with pytest.raises(NetworkError, match="its relays are in a private network"):
            await node.endpoint(Contact(PEER.peer_id, (), (Contact(RELAY.peer_id, (LAN,)),)))
        assert node.loaded is None

    asyncio.run(scenario())
