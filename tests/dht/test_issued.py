"""Another process with this peer's identity, known from the records that it issues."""

from __future__ import annotations

import pytest

from swarm.core.ids import Key, PeerId
from swarm.dht.logic.issued import IssuedRecords
from swarm.dht.logic.records import Record
from swarm.testing.identities import SeededIdentity

START_US = 1_000_000_000
OWN, OTHER = SeededIdentity(1).peer_id, SeededIdentity(2).peer_id


def record(issued_s: float, name: str = "a", writer: PeerId = OWN) -> Record:
    """Return a record that was issued this long after the start."""
    issued_us = START_US + round(issued_s * 1e6)
    return Record(
        key=Key("run.x", name),
        subkey=str(writer),
        value=b"",
        issued_at_us=issued_us,
        expiration_us=issued_us + 60_000_000,
        writer=writer,
    )


def at(seconds: float) -> int:
    return START_US + round(seconds * 1e6)


def test_second_record_that_this_process_did_not_issue_shows_another_process() -> None:
    issued = IssuedRecords(OWN, START_US)
    issued.add(record(1.0))
    assert not issued.on_received(record(2.0), at(2.5))
    assert not issued.on_received(record(2.0), at(3.0)), "the same again shows nothing new"
    assert issued.problem(at(3.0)) is None
    assert issued.on_received(record(4.0), at(4.1))
    assert not issued.on_received(record(6.0), at(6.1)), "it is said once"
    assert "identity" in str(issued.problem(at(6.1)))
    assert issued.problem(at(600.0)) is None, "the other process was stopped"
    assert issued.on_received(record(600.0), at(600.1)), "and started again"


@pytest.mark.parametrize("skew_s", [-3.0, 0.0, 3.0])
def test_records_of_an_earlier_process_show_nothing(skew_s: float) -> None:
    """The machine of that process may have had another clock."""
    issued = IssuedRecords(OWN, START_US)
    for seen_s in (0.5, 1.0, 4.0, 9.0):
        for name in ("a", "b", "c"):
            assert not issued.on_received(record(skew_s - 0.1, name), at(seen_s))
    assert issued.problem(at(9.0)) is None


def test_own_records_and_those_of_other_peers_show_nothing() -> None:
    issued = IssuedRecords(OWN, START_US)
    for second in range(1, 9):
        issued.add(record(second))
        assert not issued.on_received(record(second), at(second + 0.1))
        assert not issued.on_received(record(second - 1), at(second + 0.1)), "an older version of it"
        assert not issued.on_received(record(second, writer=OTHER), at(second + 0.1))
    assert issued.problem(at(9.0)) is None
    assert issued.latest(Key("run.x", "a"), str(OWN)) == (at(68), at(8))


def test_forgotten_entries_are_not_mistaken_for_those_of_another_process() -> None:
    issued = IssuedRecords(OWN, START_US)
    for number in range(5000):
        issued.add(record(1.0, str(number)))
    assert not issued.on_received(record(2.0, "0"), at(2.1))
    assert not issued.on_received(record(3.0, "0"), at(3.1))
    assert issued.problem(at(3.1)) is None


def test_records_between_those_of_this_process_show_another_process() -> None:
    """A replica hands them over when this process replaces them, so that its own are newer by then."""
    issued = IssuedRecords(OWN, START_US)
    for second in (1.0, 3.0, 5.0):
        issued.add(record(second))
        assert issued.previous_us(record(second)) == at(max(second - 2.0, 0.0))
        found = issued.on_received(record(second - 1.0), at(second + 0.1))
        assert found == (second == 5.0), "the second one was issued after the first was seen"


def test_an_old_record_of_this_process_that_was_forgotten_shows_nothing() -> None:
    issued = IssuedRecords(OWN, START_US)
    for second in range(1, 40):
        issued.add(record(second))
    for second in range(1, 40):
        assert not issued.on_received(record(second), at(40 + second))
    assert issued.problem(at(90.0)) is None
