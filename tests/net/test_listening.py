"""Tests of the addresses that a node listens on and announces."""

from __future__ import annotations

import pytest

from swarm.core.errors import UsageError
from swarm.core.ids import Address
from swarm.net.listening import best_addresses, given_addresses, machine_addresses, parse_listen


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.0.0.0:4000", ("0.0.0.0", 4000)), ("[::]:0", ("::", 0)), ("localhost:1", ("localhost", 1))],
)
def test_a_listen_address_is_parsed(text: str, expected: tuple[str, int]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize("text", ["", "4000", "0.0.0.0", ":4000", "0.0.0.0:x", "0.0.0.0:70000", "0.0.0.0:-1"])
def test_an_invalid_listen_address_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not host:port"):
        parse_listen(text)


def test_a_wildcard_announces_every_useful_address_best_first() -> None:
    hosts = [
        "127.0.0.1",
        "::1",
        "10.0.0.5",
        "fe80::1%eth0",
        "169.254.3.3",
        "8.8.8.8",
        "2606:4700::1",
        "0.0.0.0",
    ]
    assert [str(one) for one in best_addresses(hosts, ipv4_only=True)] == ["8.8.8.8", "10.0.0.5", "127.0.0.1"]
    assert [str(one) for one in best_addresses(hosts, ipv4_only=False)] == [
        "8.8.8.8",
        "2606:4700::1",
        "10.0.0.5",
        "127.0.0.1",
    ]


def test_a_machine_with_many_addresses_announces_eight() -> None:
    hosts = [f"10.0.0.{number}" for number in range(50)] + ["127.0.0.1"]
    chosen = best_addresses(hosts, ipv4_only=True)
    assert len(chosen) == 8
    assert str(chosen[-1]) == "127.0.0.1"


def test_a_concrete_address_is_the_only_one_of_a_machine() -> None:
    assert machine_addresses("127.0.0.1", 4000) == (Address("127.0.0.1", 4000),)
    assert Address("127.0.0.1", 4000) in machine_addresses("0.0.0.0", 4000)
    assert not any(address.host == "0.0.0.0" for address in machine_addresses("0.0.0.0", 4000))


def test_addresses_that_the_user_gives_are_parsed() -> None:
    given = (
        "203.0.113.7",
        "example.org:5000",
        "/ip4/198.51.100.1/tcp/6000/tls/http",
        "2001:db8::1",
        "[2001:db8::2]:7000",
        "203.0.113.7",
    )
    assert given_addresses(given, 4000) == (
        Address("203.0.113.7", 4000),
        Address("example.org", 5000),
        Address("198.51.100.1", 6000),
        Address("2001:db8::1", 4000),
        Address("2001:db8::2", 7000),
    )
    with pytest.raises(UsageError):
        given_addresses(("not a host",), 4000)
