"""Addresses from a DHT: only those with the scope of the user's servers are used."""

from __future__ import annotations

import pytest

from swarm.core.ids import Address, Contact, PeerId
from swarm.reach.rendezvous import reaching


def contact(number: int, *hosts: str) -> Contact:
    return Contact(PeerId(bytes([number]) * 32), tuple(Address(host, 4000) for host in hosts))


PEER = contact(1, "44.1.0.2", "192.168.1.2", "127.0.0.1")


@pytest.mark.parametrize(
    ("server", "believed"),
    [
        ("44.9.9.9", ("44.1.0.2",)),
        ("dht.example", ("44.1.0.2",)),
        ("192.168.1.1", ("44.1.0.2", "192.168.1.2")),
        ("127.0.0.1", ("44.1.0.2", "192.168.1.2", "127.0.0.1")),
    ],
)
def test_addresses_reach_as_far_as_the_servers(server: str, believed: tuple[str, ...]) -> None:
    assert reaching([PEER], [contact(2, server)]) == [contact(1, *believed)]


def test_one_public_server_is_enough_and_peers_without_addresses_are_left_out() -> None:
    servers = [contact(2, "127.0.0.1"), contact(3, "44.9.9.9")]
    assert reaching([PEER, contact(4, "10.0.0.1"), contact(5)], servers) == [contact(1, "44.1.0.2")]
