"""Announcements on a local network: which are accepted, limits of reading, and the list of runs."""

from __future__ import annotations

import random
from dataclasses import replace
from ipaddress import IPv4Interface

import pytest

from swarm.core.errors import PeerError
from swarm.core.ids import Address, Contact, PeerId
from swarm.net.logic.lan import (
    DATAGRAM_BYTES_MAX,
    PEERS_MAX,
    RUNS_MAX,
    Doorkeeper,
    NearbyPeer,
    decode,
    encode,
    grouped,
)

HERE = [IPv4Interface("192.168.7.1/24"), IPv4Interface("10.1.0.5/16")]
RUN = "abcdefghij234567abcd"


def peer(number: int = 1, host: str = "192.168.7.9", **changes: object) -> NearbyPeer:
    contact = Contact(PeerId(number.to_bytes(32, "big")), (Address(host, 4000),))
    plain = NearbyPeer(contact=contact, run_id=RUN, run_name="bytelm", is_invited=False, who="desk")
    return replace(plain, **changes)


def record(*fields: str) -> bytes:
    return b"".join(bytes([len(field.encode())]) + field.encode() for field in fields)


def test_a_decoded_record_equals_the_encoded_peer() -> None:
    for one in (peer(), peer(is_invited=True, who=""), peer(host="10.1.200.9")):
        assert decode(encode(one), HERE) == one


def test_other_implementations_find_the_address_in_the_record() -> None:
    field = f"dnsaddr=/ip4/192.168.7.9/tcp/4000/tls/http/p2p/{peer().contact.peer_id}"
    assert encode(peer()).startswith(record(field))


def test_only_private_addresses_in_the_machines_own_networks_are_believed() -> None:
    hosts = (
        "192.168.8.9",
        "10.2.0.1",
        "44.1.0.2",
        "127.0.0.1",
        "0.0.0.0",
        "100.64.0.1",
        "fd00::1",
        "a.example",
    )
    for host in hosts:
        with pytest.raises(PeerError, match="no address in a network of this machine"):
            decode(encode(peer(host=host)), HERE)
    public = [IPv4Interface("44.1.0.1/24"), IPv4Interface("100.64.0.2/10")]
    for host in ("44.1.0.2", "100.64.0.1"):  # nor those of a provider's network, though this machine is in it
        with pytest.raises(PeerError, match="no address"):
            decode(encode(peer(host=host)), public)
    mixed = Contact(peer().contact.peer_id, (Address("44.1.0.2", 1), Address("192.168.7.9", 2)))
    assert decode(encode(peer(contact=mixed)), HERE).contact.addresses == (Address("192.168.7.9", 2),)


def test_a_record_of_another_program_or_a_malformed_one_is_refused() -> None:
    good = peer().contact.multiaddrs[0]
    other = Contact(PeerId(bytes([7]) * 32), peer().contact.addresses).multiaddrs[0]
    for text in (
        b"",
        b"\x05ab",
        record(f"dnsaddr={good}"),
        record(f"dnsaddr={good}", f"dnsaddr={other}", f"swarm-run={RUN}", "swarm-name=a"),
        record(f"dnsaddr={good}", "swarm-run=../../etc", "swarm-name=a"),
        record(f"dnsaddr={good}", f"swarm-run={RUN}", "swarm-name=\x1b[2J"),
        record(f"dnsaddr={good}", f"swarm-run={RUN}", "swarm-name=" + "a" * 64),
        record("dnsaddr=/ip4/192.168.7.9/tcp/4001/p2p/12D3KooW", f"swarm-run={RUN}", "swarm-name=a"),
        encode(peer()) + bytes(4000),
    ):
        with pytest.raises(PeerError):
            decode(text, HERE)


def test_a_peer_whose_record_does_not_say_open_is_taken_to_need_an_invite() -> None:
    fields = (f"dnsaddr={peer().contact.multiaddrs[0]}", f"swarm-run={RUN}", "swarm-name=a")
    assert decode(record(*fields), HERE).is_invited


def test_names_lose_control_characters_and_everything_beyond_forty_characters() -> None:
    said = record(
        f"dnsaddr={peer().contact.multiaddrs[0]}",
        f"swarm-run={RUN}",
        "swarm-name=a",
        "swarm-members=open",
        "swarm-who=\x1b[2J\u202eeve\r\n" + "x" * 90,
    )
    assert decode(said, HERE).who == "[2Jeve" + "x" * 30
    assert decode(encode(peer(who="\ud800desk")), HERE).who == "desk"


@pytest.mark.parametrize("seed", range(30))
def test_made_up_records_raise_nothing_but_sentences(seed: int) -> None:
    rng = random.Random(seed)
    good = encode(peer())
    for _ in range(200):
        text = bytearray(good if rng.random() < 0.7 else rng.randbytes(rng.randrange(300)))
        for _ in range(rng.randrange(4)):
            if text:
                text[rng.randrange(len(text))] = rng.randrange(256)
        try:
            found = decode(bytes(text), HERE)
        except PeerError:
            continue
        assert all(any(is_in(one, net) for net in HERE) for one in found.contact.addresses)
        assert found.who.isprintable()


def is_in(address: Address, network: IPv4Interface) -> bool:
    return IPv4Interface(address.host).ip in network.network


def test_runs_are_listed_once_with_their_peers_and_those_with_most_peers_first() -> None:
    lone = peer(9, run_name="other")
    runs = grouped([lone, peer(1), peer(2), peer(2)])
    assert [(one.full_name, len(one.peers)) for one in runs] == [(f"bytelm@{RUN}", 2), (f"other@{RUN}", 1)]


def test_a_peer_with_a_different_description_of_a_run_affects_only_its_own_line() -> None:
    runs = grouped([peer(9, is_invited=True), peer(1), peer(2)])
    assert [(one.is_invited, len(one.peers)) for one in runs] == [(False, 2), (True, 1)]


def test_the_list_is_bounded() -> None:
    runs = grouped(peer(number, run_name=f"r{number % 50}") for number in range(3000))
    assert len(runs) == RUNS_MAX
    assert all(len(one.peers) == PEERS_MAX for one in runs)


QUESTION, ANSWER = bytes(12), b"\0\0\x84" + bytes(9)


def test_datagrams_from_elsewhere_and_long_ones_are_not_read() -> None:
    door = Doorkeeper(HERE, takes_answers=True)
    assert door.admits(ANSWER, "192.168.7.200", 0.0)
    assert door.admits(QUESTION, "10.1.255.1", 0.0)
    for host in ("192.168.8.1", "44.1.0.2", "127.0.0.1", "fe80::1", "10.2.0.1", "nonsense"):
        assert not door.admits(ANSWER, host, 0.0)
    assert not door.admits(ANSWER + bytes(DATAGRAM_BYTES_MAX), "192.168.7.200", 0.0)
    assert not door.admits(b"", "192.168.7.200", 0.0)


def test_a_peer_that_only_announces_reads_no_answers() -> None:
    door = Doorkeeper(HERE, takes_answers=False)
    assert door.admits(QUESTION, "192.168.7.200", 0.0)
    assert not door.admits(ANSWER, "192.168.7.200", 0.0)


@pytest.mark.parametrize("seed", range(8))
def test_a_flood_of_one_host_leaves_room_for_others_and_all_together_are_bounded(seed: int) -> None:
    rng = random.Random(seed)
    door = Doorkeeper(HERE, takes_answers=True)
    read = {"flood": 0, "honest": 0, "asked": 0}
    for step in range(10_000):  # 10 s, in which one host sends a thousand datagrams per second
        now_s = step / 1000
        read["flood"] += door.admits(ANSWER, "192.168.7.66", now_s)
        if rng.random() < 0.002:
            read["asked"] += 1
            read["honest"] += door.admits(ANSWER, f"192.168.7.{rng.randrange(100, 200)}", now_s)
    assert read["flood"] <= 40 + 10 * 10 + 1
    assert read["honest"] == read["asked"]
    everybody = sum(
        door.admits(ANSWER, f"10.1.{rng.randrange(256)}.{rng.randrange(256)}", 20.0) for _ in range(5000)
    )
    assert everybody <= 400
