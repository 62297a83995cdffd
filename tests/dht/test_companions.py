"""Which members hold the records of a run in addition to the replicas, and which ones a read asks."""

from __future__ import annotations

import pytest

from swarm.core.ids import Address, Contact, Key, PeerId
from swarm.core.standing import PeerStanding
from swarm.dht.logic.companions import (
    ASKED_AT_ONCE,
    CALLER_S,
    CHECK_INTERVAL_S,
    HOLDERS,
    INTRODUCER_INTERVAL_S,
    NAMED_MAX,
    Companions,
)

RUN = "a" * 20
KEY = Key(f"run.{RUN}", "progress")
PEERS = [PeerId(number.to_bytes(32, "big")) for number in range(1, 60)]
OWN, ENTRY = PEERS[0], PEERS[1]
MEMBERS, STRANGERS = PEERS[2:12], PEERS[20:]
LATER_US = 1 << 60


def contact(peer: PeerId) -> Contact:
    return Contact(peer, (Address("192.0.2.1", 4000),))


def near(peers: list[PeerId], key: Key = KEY) -> list[PeerId]:
    return sorted(peers, key=lambda peer: peer.dht_id ^ key.dht_id)


def companions(members: list[PeerId], gone: tuple[PeerId, ...] = ()) -> Companions:
    standing = PeerStanding()
    standing.add_members(RUN, members)
    return Companions(OWN, standing, lambda peer: None if peer in gone else contact(peer))


def ids(contacts: list[Contact]) -> list[PeerId]:
    return [one.peer_id for one in contacts]


def test_records_of_a_run_are_written_to_the_nearest_members_that_can_be_reached() -> None:
    found = companions(MEMBERS)
    assert ids(found.holders(KEY, 0.0)) == near(MEMBERS)[:HOLDERS]
    gone = near(MEMBERS)[0]
    assert ids(companions(MEMBERS, (gone,)).holders(KEY, 0.0)) == near(MEMBERS)[1 : HOLDERS + 1]
    assert found.holders(Key("public", "thing"), 0.0) == []
    assert companions([]).holders(KEY, 0.0) == []


@pytest.mark.parametrize("own_is_member", [True, False])
def test_a_peer_holds_a_key_when_it_is_one_of_the_nearest_members(own_is_member: bool) -> None:
    for number in range(30):
        key = Key(f"run.{RUN}", f"k{number}")
        found = companions([*MEMBERS, OWN] if own_is_member else MEMBERS)
        assert found.is_holder(key) == (own_is_member and OWN in near([*MEMBERS, OWN], key)[:HOLDERS])


def test_a_read_asks_members_from_time_to_time_unless_one_of_them_has_answered() -> None:
    found = companions(MEMBERS)
    nearest = near(MEMBERS)[:HOLDERS]
    assert found.to_ask(KEY, (), nearest[:1], 0.0, 0) == []
    assert found.to_ask(KEY, (), (), CHECK_INTERVAL_S - 1, 0) == []
    assert ids(found.to_ask(KEY, (), (), CHECK_INTERVAL_S, 0)) == nearest[:ASKED_AT_ONCE]


def test_a_read_asks_members_at_once_when_it_lacks_a_live_record_that_they_had() -> None:
    found = companions(MEMBERS)
    owner = (MEMBERS[3], str(MEMBERS[3]))
    found.on_answer(KEY, {owner: 1_000_000}, 0.0, 0)
    assert found.to_ask(KEY, [owner], (), 1.0, 0) == []
    assert found.to_ask(KEY, [], (), 1.0, 0) != []
    assert found.to_ask(KEY, [], (), 1.0, 1_000_000) == [], "it has expired"


def test_an_introducer_is_asked_once_a_minute_so_that_it_knows_who_takes_part() -> None:
    found = companions(MEMBERS)
    found.add_introducers([contact(ENTRY)])
    answered = near(MEMBERS)[:1]
    assert ids(found.to_ask(KEY, (), answered, 0.0, 0)) == [ENTRY]
    assert found.to_ask(KEY, (), answered, INTRODUCER_INTERVAL_S - 1, 0) == []
    assert ids(found.to_ask(KEY, (), answered, INTRODUCER_INTERVAL_S, 0)) == [ENTRY]


def test_a_newcomer_asks_its_introducers_and_only_the_members_that_they_name() -> None:
    found = companions([])
    found.add_introducers([contact(ENTRY)])
    assert ids(found.to_ask(KEY, (), [ENTRY], 0.0, 0)) == [ENTRY]
    assert found.on_named(KEY, STRANGERS[0], [contact(STRANGERS[1])]) == []
    named = [contact(peer) for peer in MEMBERS[:3]]
    assert found.on_named(KEY, ENTRY, named) == named
    assert found.named_by(RUN, [ENTRY]) == MEMBERS[:3]
    assert set(ids(found.holders(KEY, 0.0))) == {ENTRY, *MEMBERS[:3]}
    further = [contact(MEMBERS[4])]
    assert found.on_named(KEY, MEMBERS[0], further) == further
    assert found.named_by(RUN, [ENTRY]) == MEMBERS[:3], "its voice is that of an introducer"


def test_a_peer_that_knows_members_by_certificates_asks_nobody_whom_others_name() -> None:
    found = companions(MEMBERS)
    found.add_introducers([contact(ENTRY)])
    assert found.on_named(KEY, ENTRY, [contact(STRANGERS[0])]) == []
    assert ids(found.holders(KEY, 0.0)) == near(MEMBERS)[:HOLDERS]


def test_a_peer_that_is_no_member_names_those_that_have_asked_for_the_longest_time() -> None:
    found = companions([])
    for number, peer in enumerate(MEMBERS[:3]):
        found.on_question(RUN, peer, float(number))
    for peer in STRANGERS:
        found.on_question(RUN, peer, 100.0)
    assert ids(found.members_for(KEY, OWN, 101.0))[:3] == MEMBERS[:3]
    assert len(found.members_for(KEY, OWN, 101.0)) == NAMED_MAX
    assert MEMBERS[0] not in ids(found.members_for(KEY, MEMBERS[0], 101.0))
    found.on_question(RUN, MEMBERS[1], CALLER_S)
    assert ids(found.members_for(KEY, OWN, CALLER_S + 50))[0] == MEMBERS[1], "the others may be gone"


def test_a_member_names_members_and_not_those_that_ask() -> None:
    found = companions(MEMBERS)
    found.on_question(RUN, STRANGERS[0], 0.0)
    assert ids(found.members_for(KEY, STRANGERS[0], 1.0)) == near(MEMBERS)[:HOLDERS]


def test_a_member_that_knows_no_other_one_names_nobody() -> None:
    """Such a member named other newcomers without records, so that each wrote to the others and queried
    them.
    """
    found = companions([OWN])
    found.on_question(RUN, STRANGERS[0], 0.0)
    assert found.members_for(KEY, STRANGERS[1], 1.0) == []


def test_questions_about_many_runs_by_many_peers_take_bounded_memory() -> None:
    found = companions([])
    for number in range(2000):
        for peer in STRANGERS[:3]:
            found.on_question(f"run{number}", peer, 1.0, f"network {number}")
    named = sum(bool(found.members_for(Key(f"run.run{number}", "x"), OWN, 1.0)) for number in range(2000))
    assert named == 256
    found.on_question("late", STRANGERS[0], 2 * CALLER_S)
    assert found.members_for(Key("run.late", "x"), OWN, 2 * CALLER_S), (
        "runs that nobody asks about are forgotten"
    )


def test_one_network_takes_a_quarter_of_the_places_of_those_that_asked_about_runs() -> None:
    """Regression: an attacker that asked a fresh entry point about 256 invented runs, or 64 times about a
    run, was all that it remembered, and newcomers were led to the attacker.
    """
    found = companions([])
    crowd = [PeerId(number.to_bytes(32, "big")) for number in range(1000, 2000)]
    for number, peer in enumerate(crowd):
        found.on_question(f"{number:020}", peer, 0.0, "203.0.113.0/24")
        found.on_question(RUN, peer, 0.0, "203.0.113.0/24")
    for peer in MEMBERS[:2]:
        found.on_question(RUN, peer, 1.0, "198.51.100.0/24")
    found.on_question("another", MEMBERS[0], 1.0, "198.51.100.0/24")
    assert ids(found.members_for(KEY, OWN, 2.0))[:4] == [crowd[0], MEMBERS[0], crowd[1], MEMBERS[1]]
    assert ids(found.members_for(Key("run.another", "progress"), OWN, 2.0)) == MEMBERS[:1]
