"""Peers that are asked to call back, over real sockets: which address they call, what they
say, and how often."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from swarm.core.errors import PeerError
from swarm.core.ids import Address, Contact
from swarm.libp2p.host import Host
from swarm.net.dialback import DIAL_BACK
from swarm.net.hello import HELLO
from swarm.node import Node, NodeConfig
from swarm.wire import peer_pb2

HERE = "127.0.0.1:0"
TIMEOUT_S = 20.0


@pytest.fixture
def asked() -> Iterator[Node]:
    with Node(listen=HERE) as node:
        yield node


def ask(asker: Node, asked: Node, port: int, *, relay: bool = False) -> peer_pb2.DialBackReply:
    request = peer_pb2.DialBackRequest(port=port, relay=relay)
    calling = asker.channels.call(asked.contact, DIAL_BACK, request, timeout_s=TIMEOUT_S)
    reply: peer_pb2.DialBackReply = asker.network.run(calling, TIMEOUT_S + 1.0)
    return reply


def test_a_peer_is_told_that_it_was_called_back_and_where(asked: Node) -> None:
    with Node(listen=HERE) as asker:
        reply = ask(asker, asked, asker.contact.addresses[0].port)
        assert (reply.reached, reply.observed) == (True, "127.0.0.1")
        with pytest.raises(PeerError, match="called back less than 10 s ago"):
            ask(asker, asked, asker.contact.addresses[0].port)


def test_a_peer_may_ask_for_the_port_at_which_it_relays_right_after_its_own(asked: Node) -> None:
    with Node(listen=HERE) as asker:
        port = asker.contact.addresses[0].port
        assert ask(asker, asked, port).reached
        assert not ask(asker, asked, port, relay=True).reached  # nobody speaks libp2p there


def test_a_port_where_somebody_else_answers_counts_as_not_reached(asked: Node) -> None:
    with Node(listen=None) as asker, Node(listen=HERE) as other:
        assert not ask(asker, asked, other.contact.addresses[0].port).reached


def test_the_reason_why_a_port_was_not_reached_is_not_sent(asked: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, Node(listen=None) as asker:
        reply = ask(asker, asked, silent.getsockname()[1])
        assert reply == peer_pb2.DialBackReply(reached=False, observed="127.0.0.1")


def test_the_port_of_a_relay_is_reached_where_a_libp2p_host_answers_and_nowhere_else(asked: Node) -> None:
    with Node(listen=HERE) as asker, Node(listen=None) as other, Node(listen=None) as third:

        async def listen() -> Host:
            host = Host(asker.identity)
            await host.start("127.0.0.1")
            return host

        host = asker.network.run(listen(), TIMEOUT_S)
        assert host.listening is not None
        assert ask(asker, asked, host.listening.port, relay=True).reached
        assert not ask(other, asked, asker.contact.addresses[0].port, relay=True).reached
        with socket.create_server(("127.0.0.1", 0)) as silent:
            assert not ask(third, asked, silent.getsockname()[1], relay=True).reached
        asker.network.run(host.close(), TIMEOUT_S)


@pytest.mark.parametrize("port", [0, 65536, 2**32 - 1])
def test_an_invalid_port_is_refused(asked: Node, port: int) -> None:
    with Node(listen=None) as asker, pytest.raises(PeerError, match="is not a TCP port"):
        ask(asker, asked, port)


def test_a_hello_says_where_it_came_from(asked: Node) -> None:
    with Node(listen=None) as asker:
        request = peer_pb2.Hello(contact={"peer_id": asker.peer_id.to_bytes()})
        calling = asker.channels.call(asked.contact, HELLO, request, timeout_s=TIMEOUT_S)
        assert asker.network.run(calling, TIMEOUT_S + 1.0).observed == "127.0.0.1"


def test_a_peer_that_enters_through_the_internet_announces_nothing_before_it_was_called(asked: Node) -> None:
    public = Contact(asked.peer_id, (Address("8.8.8.8", 4000),))  # nobody is there
    with Node(public, listen="0.0.0.0:0") as node:
        assert (node.addresses, node.reach, node.entry) == ([], "unknown", public.multiaddrs[0])
    with Node(public, listen="0.0.0.0:0", config=NodeConfig(announce=("1.2.3.4:5",))) as node:
        assert (node.contact.addresses, node.reach) == ((Address("1.2.3.4", 5),), "direct")
    with Node(public, listen="0.0.0.0:0", config=NodeConfig(preset="lan")) as node:
        assert (bool(node.addresses), node.reach) == (True, "direct")
    with Node(listen=None) as node:
        assert (node.addresses, node.reach) == ([], "none")


def test_a_peer_that_enters_by_a_host_name_announces_private_addresses_once_the_name_resolves_to_one(
    asked: Node,
) -> None:
    named = Contact(asked.peer_id, (Address("localhost", asked.contact.addresses[0].port),))
    with Node(named, listen=HERE) as node:
        assert node.wait_joined(TIMEOUT_S)
        assert (bool(node.addresses), node.reach) == (True, "direct")
