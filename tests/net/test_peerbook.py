"""Tests of the peer book: which addresses it trusts, which peers it forgets, and its copy on disk."""

from __future__ import annotations

import json
import logging
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.core.ids import ADDRESSES_MAX, Address, Contact, PeerId
from swarm.net.peerbook import PeerBook, reached_peers


class Time:
    """Unix time that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def contact(number: int, *ports: int) -> Contact:
    return Contact(peer(number), tuple(Address("203.0.113.7", port) for port in ports))


OWN = peer(0)


def test_the_address_of_the_last_connection_comes_before_those_that_the_peer_announced() -> None:
    book = PeerBook(OWN, Time())
    book.record_connection(peer(1), Address("203.0.113.7", 10))
    assert book.contact(peer(1)) == contact(1, 10)
    book.record_seen(contact(1, 20, 30), round_trip_s=0.1, agent="swarm/1")
    assert book.contact(peer(1)) == contact(1, 20, 30)
    book.record_connection(peer(1), Address("203.0.113.7", 30))
    assert book.contact(peer(1)) == contact(1, 30, 20)
    known = book.known()[0]
    assert (known.round_trip_s, known.agent) == (0.1, "swarm/1")
    assert book.contact(peer(9)) is None


def test_round_trips_are_smoothed() -> None:
    book = PeerBook(OWN, Time())
    book.record_seen(contact(1, 10), round_trip_s=0.1)
    book.record_seen(contact(1, 10), round_trip_s=0.2)
    book.record_seen(contact(1, 10))
    assert book.known()[0].round_trip_s == pytest.approx(0.13)


def test_a_peer_is_not_in_its_own_book() -> None:
    book = PeerBook(OWN, Time())
    book.record_seen(contact(0, 10))
    book.record_connection(OWN, Address("203.0.113.7", 10))
    assert book.known() == []


def test_a_full_book_learns_new_peers_also_after_the_clock_was_set_back() -> None:
    time = Time()
    book = PeerBook(OWN, time, entries_max=3)
    for number in range(1, 4):
        book.record_seen(contact(number, 10))
    time.now_s -= 3600.0
    book.record_seen(contact(4, 10))
    assert book.contact(peer(4)) is not None
    assert len(book.known()) == 3


def test_the_book_is_bounded_and_keeps_the_peers_seen_last() -> None:
    book = PeerBook(OWN, Time(), entries_max=10)
    for number in range(1, 11):
        book.record_seen(contact(number, 10))
    book.record_connection(peer(1), Address("203.0.113.7", 11))
    for number in range(11, 16):
        book.record_seen(contact(number, 10))
    assert [known.peer_id for known in book.known()] == [
        peer(n) for n in (15, 14, 13, 12, 11, 1, 10, 9, 8, 7)
    ]
    book.record_seen(contact(1, *range(100, 200)))
    book.record_connection(peer(1), Address("203.0.113.7", 12))
    stored = book.contact(peer(1))
    assert stored is not None
    assert len(stored.addresses) == ADDRESSES_MAX


def test_the_copy_on_disk_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "identity.peers"
    book = PeerBook(OWN, Time(), path)
    book.record_seen(contact(1, 10), round_trip_s=0.5, agent="swarm/1")
    book.record_seen(contact(2, 20, 21))
    book.record_seen(contact(3))
    book.save()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = PeerBook(OWN, Time(), path)
    listed = [known for known in book.known() if known.contact.addresses]
    assert again.known() == [replace(known, is_met=False) for known in listed], (
        "only an earlier process met it"
    )
    assert PeerBook(peer(1), Time(), path).contact(peer(1)) is None
    path.unlink()
    again.save()
    assert not path.exists(), "nothing changed, nothing is written"
    again.forget(peer(1))
    again.save()
    assert [known.peer_id for known in PeerBook(OWN, Time(), path).known()] == [peer(2)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 2, "peers": []}',
        '{"format": 1, "peers": [{}]}',
        '{"format": 1, "peers": [3]}',
        '{"format": 1, "peers": [{"peer_id": "x", "addresses": [null]}]}',
        '{"format": 1, "peers": [{"peer_id": "x", "addresses": [7]}]}',
        '{"format": 1, "peers": [{"peer_id": null, "addresses": []}]}',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_a_damaged_copy_is_replaced(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "identity.peers"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with caplog.at_level(logging.WARNING):
        book = PeerBook(OWN, Time(), path)
    assert "cannot be read" in caplog.text
    assert book.known() == []
    assert path.with_name("identity.peers.damaged").read_bytes() == text.encode("utf-8", "surrogateescape")
    book.record_seen(contact(1, 10))
    book.save()
    assert json.loads(path.read_text())["peers"][0]["peer_id"] == str(peer(1))


def test_a_copy_that_cannot_be_written_is_logged_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    book = PeerBook(OWN, Time(), tmp_path / "gone" / "identity.peers")
    book.record_seen(contact(1, 10))
    book.save()
    assert "cannot be written" in caplog.text


def test_a_copy_for_a_run_has_the_peers_of_earlier_processes_too(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run.peers"  # in a folder that is made
    first = PeerBook(OWN, Time())
    first.keep_at(path)
    first.record_connection(peer(1), Address("203.0.113.7", 10))
    first.record_seen(contact(2, 20))  # its own claim: nobody has connected there
    first.save()
    later = PeerBook(OWN, Time())
    later.record_connection(peer(3), Address("203.0.113.7", 30))
    later.keep_at(path)
    assert {one.peer_id for one in later.known()} == {peer(1), peer(2), peer(3)}
    found = reached_peers(path, peers_max=10)
    assert {one.peer_id: one.addresses for one in found} == {
        peer(1): (Address("203.0.113.7", 10),),
        peer(3): (Address("203.0.113.7", 30),),
    }


def test_peers_are_entered_again_where_they_were_reached_and_not_where_they_say(tmp_path: Path) -> None:
    book = PeerBook(OWN, Time())
    book.keep_at(tmp_path / "run.peers")
    for number in (1, 2, 3):
        book.record_connection(peer(number), Address("203.0.113.7", number))
    book.record_seen(Contact(peer(1), (Address("192.168.1.1", 80),)))
    book.record_seen(Contact(peer(3)))  # it announces nothing any more, and may be there nevertheless
    book.save()
    found = reached_peers(tmp_path / "run.peers", peers_max=2)
    assert found == [contact(3, 3), contact(1, 1)]
    assert reached_peers(tmp_path / "absent.peers", peers_max=2) == []
