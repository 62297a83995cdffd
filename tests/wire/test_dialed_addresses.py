"""Which addresses of other peers a node dials, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swarm.core.errors import NetworkError
from swarm.core.ids import Address, Contact
from swarm.net.hello import HELLO
from swarm.net.scope import NOT_DIALED
from swarm.node import Node, NodeConfig
from swarm.wire.peer_pb2 import Hello

TIMEOUT_S = 20.0


@pytest.fixture
def public() -> Iterator[Node]:
    """A node that announces an address of the internet."""
    with Node(listen="127.0.0.1:0", config=NodeConfig(announce=("8.8.8.8",))) as node:
        yield node


def call(caller: Node, contact: Contact) -> None:
    request = Hello(contact={"peer_id": caller.peer_id.to_bytes()})
    caller.network.run(caller.channels.call(contact, HELLO, request, timeout_s=TIMEOUT_S), TIMEOUT_S + 1.0)


def test_a_node_in_the_internet_dials_a_peer_on_loopback_only_after_it_has_called(public: Node) -> None:
    assert public.contact.addresses[0].host == "8.8.8.8"
    with Node(listen="127.0.0.1:0") as near:
        with pytest.raises(NetworkError, match=NOT_DIALED):
            call(public, near.contact)
        named = Contact(near.peer_id, (Address("localhost", near.contact.addresses[0].port),))
        with pytest.raises(NetworkError, match=NOT_DIALED):
            call(public, named)
        call(near, Contact(public.peer_id, (Address("127.0.0.1", public.contact.addresses[0].port),)))
        call(public, near.contact)


def test_nodes_on_loopback_dial_each_other_without_having_met() -> None:
    with Node(listen="127.0.0.1:0") as one, Node(listen="127.0.0.1:0") as other:
        call(one, other.contact)
