"""A node dials no address of its own machine or network because a peer that it met over the internet says so;
peers on loopback and on a LAN reach each other as before.
"""

from __future__ import annotations

import pytest

from swarm.core.ids import Address, Contact
from swarm.net.scope import Scope, Surroundings, endpoint_of, prefix_of, scope_of
from swarm.testing.identities import SeededIdentity

PEER, OTHER, ENTRY = (SeededIdentity(name).peer_id for name in ("peer", "other", "entry"))
LOOPBACK, LAN, PUBLIC = "127.0.0.1", "192.168.1.7", "8.8.8.8"
PORT = 4000


def dialed(surroundings: Surroundings, *hosts: str) -> list[str]:
    """Return those hosts at which `PEER` is dialed, each an address of its own."""
    return [host for host in hosts if surroundings.dialable(PEER, Address(host, PORT), [host])]


def entered(host: str, widest: Scope = Scope.INTERNET) -> Surroundings:
    return Surroundings([Contact(ENTRY, (Address(host, PORT),))], widest)


@pytest.mark.parametrize(
    ("host", "scope"),
    [
        ("127.0.0.1", Scope.MACHINE),
        ("127.8.8.8", Scope.MACHINE),
        ("::1", Scope.MACHINE),
        ("0.0.0.0", Scope.MACHINE),
        ("::ffff:127.0.0.1", Scope.MACHINE),
        ("10.0.0.1", Scope.SITE),
        ("172.16.3.4", Scope.SITE),
        ("192.168.1.1", Scope.SITE),
        ("169.254.169.254", Scope.SITE),
        ("100.64.0.1", Scope.SITE),
        ("::ffff:192.168.1.1", Scope.SITE),
        ("fe80::1%eth0", Scope.SITE),
        ("fd00::1", Scope.SITE),
        ("224.0.0.1", Scope.SITE),
        ("8.8.8.8", Scope.INTERNET),
        ("2600::1", Scope.INTERNET),
        ("example.org", None),
    ],
)
def test_every_host_has_the_scope_of_its_address(host: str, scope: Scope | None) -> None:
    assert scope_of(host) == scope


@pytest.mark.parametrize(
    ("entry", "allowed"),
    [
        (LOOPBACK, [LOOPBACK, LAN, PUBLIC]),
        (LAN, [LAN, PUBLIC]),
        (PUBLIC, [PUBLIC]),
    ],
)
def test_a_peer_is_dialed_in_the_network_in_which_this_node_met_it(entry: str, allowed: list[str]) -> None:
    assert dialed(entered(entry), LOOPBACK, LAN, PUBLIC) == allowed
    alone = Surroundings()
    alone.widen([entry])  # the first peer of a swarm, which announces this address
    assert dialed(alone, LOOPBACK, LAN, PUBLIC) == allowed


@pytest.mark.parametrize(
    ("caller", "allowed"),
    [
        (LOOPBACK, [LOOPBACK, LAN, PUBLIC]),
        (LAN, [LAN, PUBLIC]),
        (PUBLIC, [PUBLIC]),
    ],
)
def test_a_peer_that_called_from_a_near_address_is_dialed_there(caller: str, allowed: list[str]) -> None:
    surroundings = entered(PUBLIC)
    surroundings.on_called(PEER, caller)
    surroundings.on_called(PEER, PUBLIC)  # also when it calls from farther away, too
    assert dialed(surroundings, LOOPBACK, LAN, PUBLIC) == allowed
    assert surroundings.dialable(OTHER, Address(LAN, PORT), [LAN]) == []


def test_an_address_that_the_user_named_is_always_dialed() -> None:
    named = Contact(PEER, (Address(LAN, PORT), Address("home.example", PORT)))
    surroundings = Surroundings([named, Contact(ENTRY, (Address(PUBLIC, PORT),))])
    assert dialed(surroundings, LAN) == [LAN]
    assert surroundings.dialable(PEER, Address(LAN, PORT + 1), [LAN]) == []
    assert surroundings.dialable(OTHER, Address(LAN, PORT), [LAN]) == []
    assert surroundings.dialable(PEER, Address("home.example", PORT), [LOOPBACK]) == [LOOPBACK]


def test_a_name_counts_as_what_it_resolves_to() -> None:
    entry = Contact(ENTRY, (Address("swarm.example", PORT),))
    surroundings, name = Surroundings([entry]), Address("evil.example", PORT)
    assert surroundings.own is Scope.MACHINE  # not resolved yet
    assert surroundings.dialable(ENTRY, entry.addresses[0], [PUBLIC]) == [PUBLIC]
    assert surroundings.own is Scope.INTERNET
    assert surroundings.dialable(PEER, name, [LOOPBACK, PUBLIC, LAN]) == [PUBLIC]


def test_a_scope_that_the_user_gives_decides_which_addresses_are_dialed() -> None:
    assert dialed(entered(PUBLIC, Scope.SITE), LOOPBACK, LAN, PUBLIC) == [LAN, PUBLIC]
    assert dialed(entered(PUBLIC, Scope.MACHINE), LOOPBACK, LAN) == [LOOPBACK, LAN]


def test_a_prefix_is_a_24_network_of_ipv4_and_a_48_network_of_ipv6() -> None:
    assert prefix_of("203.0.113.77") == prefix_of("203.0.113.1") == "203.0.113.0/24"
    assert prefix_of("::ffff:203.0.113.9") == "203.0.113.0/24"
    assert prefix_of("2001:db8:1:2::3") == prefix_of("2001:db8:1:ffff::9") == "2001:db8:1::/48"
    assert prefix_of("2001:db8:2::") != prefix_of("2001:db8:1::")


def test_the_other_end_of_a_connection_is_read_as_grpc_names_it() -> None:
    assert endpoint_of("ipv4:192.0.2.1:4000") == ("192.0.2.1", 4000)
    assert endpoint_of("ipv6:%5B2001:db8::1%5D:4000") == ("2001:db8::1", 4000)
    assert endpoint_of("ipv6:%5B::ffff:192.0.2.1%5D:4000") == ("192.0.2.1", 4000)
    assert endpoint_of("unix:/tmp/x") == ("unix:/tmp/x", 0)


def test_only_addresses_that_reach_as_far_as_this_node_is_are_announced() -> None:
    addresses = [Address(host, PORT) for host in (PUBLIC, LAN, LOOPBACK, "example.org")]
    for entry, hosts in (
        (LOOPBACK, [PUBLIC, LAN, LOOPBACK, "example.org"]),
        (LAN, [PUBLIC, LAN, "example.org"]),
        (PUBLIC, [PUBLIC, "example.org"]),
    ):
        assert [one.host for one in entered(entry).announceable(addresses)] == hosts


def test_a_call_is_awaited_from_the_internet_only() -> None:
    surroundings = entered(PUBLIC)
    surroundings.on_called(PEER, PUBLIC)
    with surroundings.awaiting(PEER) as source:
        surroundings.on_called(OTHER, PUBLIC)
        surroundings.on_called(PEER, LAN)
        assert source() == ""
        surroundings.on_called(PEER, PUBLIC)
        assert source() == PUBLIC
