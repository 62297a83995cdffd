"""Tests of identifiers: PeerIds equal libp2p's own, and malformed ones are refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import ADDRESSES_MAX, Address, Contact, Key, PeerId

PUBLIC = bytes(range(32))
PEER = PeerId(PUBLIC)


@pytest.mark.parametrize("seed", range(20))
def test_a_peer_id_equals_libp2ps(seed: int) -> None:
    from libp2p.crypto.ed25519 import Ed25519PublicKey, create_new_key_pair
    from libp2p.peer.id import ID

    public = create_new_key_pair(bytes([seed + 1] * 32)).public_key
    theirs = ID.from_pubkey(public)
    ours = PeerId(public.to_bytes())
    assert str(ours) == theirs.to_base58()
    assert ours.to_bytes() == theirs.to_bytes()
    assert PeerId.parse(theirs.to_base58()) == ours == PeerId.from_bytes(theirs.to_bytes())
    extracted = (
        theirs.extract_public_key()
        if hasattr(theirs, "extract_public_key")
        else Ed25519PublicKey.from_bytes(ours.public_key)
    )
    assert extracted is None or extracted.to_bytes() == ours.public_key


@given(st.binary(min_size=32, max_size=32))
def test_a_peer_id_survives_both_encodings(public: bytes) -> None:
    peer = PeerId(public)
    assert PeerId.parse(str(peer)) == peer
    assert PeerId.from_bytes(peer.to_bytes()) == peer
    assert len(str(peer)) == 52
    assert 0 <= peer.dht_id < 1 << 256


@pytest.mark.parametrize("value", [32 * "a", 38 * "a", [0] * 32, [0] * 38, None, 5, bytes(31), bytearray(32)])
def test_what_is_no_public_key_of_32_bytes_makes_no_peer_id(value: Any) -> None:
    for make in (PeerId, PeerId.from_bytes):
        with pytest.raises(UsageError):
            make(value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12D3KooW",
        "x" * 300,
        str(PEER)[:-1],
        str(PEER) + "1",
        str(PEER).replace("K", "0"),
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    ],
)
def test_text_that_is_no_peer_id_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="PeerID"):
        PeerId.parse(text)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        PEER.to_bytes()[:-1],
        PEER.to_bytes() + b"x",
        b"\x00\x25" + PEER.to_bytes()[2:],
        b"\x12\x20" + PUBLIC,
    ],
)
def test_bytes_that_are_no_peer_id_are_refused(raw: bytes) -> None:
    with pytest.raises(UsageError, match="PeerID"):
        PeerId.from_bytes(raw)


@pytest.mark.parametrize(
    ("multiaddr", "address", "target"),
    [
        ("/ip4/203.0.113.7/tcp/4000", Address("203.0.113.7", 4000), "ipv4:203.0.113.7:4000"),
        ("/ip4/203.0.113.7/tcp/4000/tls/http", Address("203.0.113.7", 4000), "ipv4:203.0.113.7:4000"),
        ("/ip6/2001:db8::1/tcp/4000/tls/http", Address("2001:db8::1", 4000), "ipv6:[2001:db8::1]:4000"),
        ("/dns4/swarm.example.org/tcp/1", Address("swarm.example.org", 1), "dns:swarm.example.org:1"),
    ],
)
def test_an_address_is_parsed_and_formatted(multiaddr: str, address: Address, target: str) -> None:
    assert Address.parse(multiaddr) == address
    assert address.target == target
    assert Address.parse(address.multiaddr) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "203.0.113.7:4000",
        "/ip4/203.0.113.7/udp/4000",
        "/ip4/203.0.113.7/tcp/70000",
        "/ip4/203.0.113.7/tcp/-1",
        "/ip4/203.0.113.7/tcp/٣",
        "/ip4/203.0.113.7/tcp/4000/tls/ws",
        "/ip4/2001:db8::1/tcp/4000",
        "/ip6/203.0.113.7/tcp/4000",
        "/dns/not a name/tcp/4000",
        "/dns/" + "a" * 300 + "/tcp/4000",
        "/ip4/203.0.113.7/tcp/0",
    ],
)
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Address.parse(text)


def test_a_contact_is_parsed_and_formatted() -> None:
    contact = Contact.parse(f"  /ip4/203.0.113.7/tcp/4000/tls/http/p2p/{PEER}\n")
    assert contact == Contact(PEER, (Address("203.0.113.7", 4000),))
    assert [Contact.parse(text) for text in contact.multiaddrs] == [contact]
    with pytest.raises(UsageError, match="names no peer"):
        Contact.parse("/ip4/203.0.113.7/tcp/4000")


def test_a_key_has_a_namespace_and_a_name() -> None:
    assert Key.parse("loss") == Key("public", "loss")
    assert Key.parse("run.abc/a/b") == Key("run.abc", "a/b")
    assert str(Key.parse("run.abc/progress")) == "run.abc/progress"
    assert Key.parse("a").dht_id != Key.parse("b").dht_id
    for text in ("", "/x", "x/", "n/" + "x" * 300):
        with pytest.raises(UsageError):
            Key.parse(text)


def test_a_published_contact_is_read_back_from_its_record() -> None:
    contact = Contact(PeerId(bytes(32)), tuple(Address("127.0.0.1", 4000 + number) for number in range(10)))
    assert len(contact.published) == ADDRESSES_MAX
    assert (
        Contact.from_record(contact.peer_id, contact.published).addresses == contact.addresses[:ADDRESSES_MAX]
    )


@pytest.mark.parametrize(
    "addresses", [None, "text", [7], ["no address"], ["/ip4/127.0.0.1/tcp/1/tls/http"] * 9]
)
def test_a_malformed_list_of_addresses_is_the_fault_of_its_writer(addresses: object) -> None:
    with pytest.raises(PeerError):
        Contact.from_record(PeerId(bytes(32)), addresses)
