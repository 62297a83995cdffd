"""The ledger: how long a peer is passed over, when it is accepted again, and which peers are remembered."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from swarm.core.errors import PeerError
from swarm.core.ids import PeerId
from swarm.membership.ledger import ENTRIES_MAX, MemberLedger


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


OWN = peer(0)
MEMBERS = [peer(number) for number in range(1, 5)]


def ledger_of_members() -> MemberLedger:
    ledger = MemberLedger(OWN)
    ledger.certified(MEMBERS, 0.0)
    return ledger


def rounds_passed_over(ledger: MemberLedger, one: PeerId) -> int:
    """Return how many of the rounds after the present one go by before a peer is taken again."""
    ledger.certified([], 0.0)  # the round with the fault
    count = 0
    while ledger.is_passed_over(one):
        ledger.certified([], 0.0)
        count += 1
    return count


def test_a_member_is_passed_over_for_1_4_16_and_at_most_64_rounds() -> None:
    ledger = ledger_of_members()
    counts = []
    for _ in range(6):
        ledger.fault(MEMBERS[0], 0.0)
        assert not ledger.is_passed_over(MEMBERS[1])
        counts.append(rounds_passed_over(ledger, MEMBERS[0]))
    assert counts == [1, 4, 16, 64, 64, 64]


def test_faults_before_a_peer_is_taken_again_count_once() -> None:
    ledger = ledger_of_members()
    for _ in range(5):
        ledger.fault(MEMBERS[0], 0.0)
    assert rounds_passed_over(ledger, MEMBERS[0]) == 1
    entry = ledger.entry(MEMBERS[0])
    assert entry is not None
    assert entry.faults == 5


@pytest.mark.parametrize(("rounds", "expected"), [(15, 16), (16, 4), (31, 4), (32, 1), (400, 1)])
def test_certified_rounds_take_back_one_step_after_the_other(rounds: int, expected: int) -> None:
    """A member that works between its faults stalls at most one round in 18."""
    ledger = ledger_of_members()
    for _ in range(2):
        ledger.fault(MEMBERS[0], 0.0)
        rounds_passed_over(ledger, MEMBERS[0])
    for _ in range(rounds):
        ledger.certified(MEMBERS, 0.0)
    ledger.fault(MEMBERS[0], 0.0)
    assert rounds_passed_over(ledger, MEMBERS[0]) == expected


@pytest.mark.parametrize("strangers", [1, 16, 1000])
def test_new_identities_stall_no_more_rounds_than_one_does(strangers: int) -> None:
    """An attacker takes a new identity for every fault; it has a few rounds in two hundred."""
    ledger, stalled = ledger_of_members(), 0
    for number in range(200):
        stranger = peer(1000 + number % strangers)
        if not ledger.is_passed_over(stranger):
            ledger.fault(stranger, 0.0)
            stalled += 1
        ledger.certified(MEMBERS, 0.0)
    assert 1 <= stalled <= 6
    assert not any(ledger.is_passed_over(member) for member in MEMBERS)


@pytest.mark.parametrize("newcomers", [8, 100])
def test_newcomers_that_have_worked_stall_one_round_each_and_hardly_any_more(newcomers: int) -> None:
    """Each contributes to three certified rounds. Then one of the accepted ones stalls in each round, and the
    others stay away. Before, a hundred of them could stall every round forever, because each was accepted
    again after 64 rounds.
    """
    ledger = ledger_of_members()
    crowd = [peer(1000 + number) for number in range(newcomers)]
    for _ in range(3):
        ledger.certified([*MEMBERS, *crowd], 0.0)
    stalls = []
    for number in range(newcomers + 800):
        taken = [one for one in crowd if not ledger.is_passed_over(one)]
        # those that have not stalled yet come first, as an attacker does it that knows the rule
        bad = min(taken, key=lambda one: entry.faults if (entry := ledger.entry(one)) else 0, default=None)
        if bad is not None:
            ledger.fault(bad, 0.0)
            stalls.append(number)
        ledger.certified(MEMBERS, 0.0)
    once = len([number for number in stalls if number < newcomers + 20])
    assert newcomers <= once <= newcomers + 4
    assert len(stalls) - once <= 800 * 4 // 80, "one in 20 rounds at most"
    assert not any(ledger.is_passed_over(one) for one in MEMBERS)


def test_a_peer_that_repeats_its_faults_has_no_other_one_passed_over() -> None:
    ledger = ledger_of_members()
    ledger.fault(MEMBERS[1], 0.0)
    rounds_passed_over(ledger, MEMBERS[1])
    for _ in range(4):
        ledger.fault(MEMBERS[0], 0.0)
        rounds_passed_over(ledger, MEMBERS[0])
    ledger.fault(MEMBERS[0], 0.0)
    assert not ledger.is_passed_over(MEMBERS[1])


def test_only_peers_with_a_fault_that_are_no_electors_share_an_account() -> None:
    ledger = ledger_of_members()
    for one in MEMBERS[:3]:
        ledger.fault(one, 0.0)
    rounds_passed_over(ledger, MEMBERS[2])
    ledger.fault(MEMBERS[0], 0.0)
    assert ledger.is_passed_over(MEMBERS[2])
    assert not ledger.is_passed_over(MEMBERS[2], electors=MEMBERS[2:3])
    assert not ledger.is_passed_over(MEMBERS[3])


def test_a_stranger_that_contributes_has_an_account_of_its_own() -> None:
    ledger = ledger_of_members()
    ledger.fault(peer(100), 0.0)
    assert ledger.is_passed_over(peer(101))
    ledger.contributed({peer(101): 5.0}, 7.0)
    assert not ledger.is_passed_over(peer(101))
    entry = ledger.entry(peer(101))
    assert entry is not None
    assert (entry.rounds, entry.samples, entry.last_seen_s) == (1, 5.0, 7.0)


def test_a_leader_that_did_not_begin_is_known_as_such_while_it_is_passed_over() -> None:
    ledger = ledger_of_members()
    ledger.fault(MEMBERS[0], 0.0, held=True)
    assert ledger.is_holding(MEMBERS[0])
    rounds_passed_over(ledger, MEMBERS[0])
    assert not ledger.is_holding(MEMBERS[0])
    ledger.fault(MEMBERS[0], 0.0)
    assert not ledger.is_holding(MEMBERS[0])


def test_this_peer_never_blames_itself() -> None:
    ledger = ledger_of_members()
    ledger.fault(OWN, 0.0)
    assert not ledger.is_passed_over(OWN)


@pytest.mark.parametrize("seed", range(20))
def test_members_displace_strangers_and_never_the_reverse(seed: int) -> None:
    rng, ledger = random.Random(seed), MemberLedger(OWN, entries_max=8)
    members: set[PeerId] = set()
    for now_s in range(200):
        one = peer(rng.randrange(1, 40))
        if rng.random() < 0.3 and len(members | {one}) <= 8:
            ledger.contributed({one: 1.0}, float(now_s))
            members.add(one)
        else:
            ledger.fault(one, float(now_s))
        assert len(ledger) <= 8
        assert all(ledger.is_proven(member) for member in members)


def test_of_equals_the_one_that_was_seen_longest_ago_is_forgotten() -> None:
    ledger = MemberLedger(OWN, entries_max=2)
    for number, now_s in ((1, 1.0), (2, 2.0), (1, 3.0), (3, 4.0)):
        ledger.contributed({peer(number): 1.0}, now_s)
    assert [ledger.is_proven(peer(number)) for number in (1, 2, 3)] == [True, False, True]


def test_the_copy_on_disk_keeps_what_is_known_and_the_steps_of_the_pauses() -> None:
    ledger = ledger_of_members()
    ledger.contributed({MEMBERS[1]: 12.5}, 9.0)
    for _ in range(2):
        ledger.fault(MEMBERS[0], 5.0)
        rounds_passed_over(ledger, MEMBERS[0])
    again = MemberLedger(OWN)
    again.load(json.loads(json.dumps(ledger.encode())))
    assert again.encode() == ledger.encode()
    assert not again.is_passed_over(MEMBERS[0]), "a peer that starts again meets everybody once"
    again.fault(MEMBERS[0], 5.0)
    assert rounds_passed_over(again, MEMBERS[0]) == 16


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"format": 2, "rounds": 0, "peers": []},
        {"format": 1, "rounds": -1, "peers": []},
        {"format": 1, "rounds": True, "peers": []},
        {"format": 1, "rounds": 0, "peers": [["00", 0, 0.0, 0, 0.0, 0]]},
        {"format": 1, "rounds": 0, "peers": [["01" * 32, 0, float("nan"), 0, 0.0, 0]]},
        {"format": 1, "rounds": 0, "peers": [["01" * 32, 0, 0.0, 0, 0.0]]},
        {"format": 1, "rounds": 0, "peers": [["01" * 32, 0.5, 0.0, 0, 0.0, 0]]},
        {"format": 1, "rounds": 0, "peers": [[1, 0, 0.0, 0, 0.0, 0]]},
        {"format": 1, "rounds": 0, "peers": 3},
    ],
)
def test_a_malformed_ledger_changes_nothing(document: Any) -> None:
    ledger = ledger_of_members()
    before = ledger.encode()
    with pytest.raises(PeerError, match="not a ledger"):
        ledger.load(document)
    assert ledger.encode() == before


def test_a_copy_that_is_too_long_is_cut() -> None:
    rows = [[peer(number).public_key.hex(), 1, 0.0, 0, 0.0, 0] for number in range(1, ENTRIES_MAX + 10)]
    ledger = MemberLedger(OWN)
    ledger.load({"format": 1, "rounds": 1, "peers": rows})
    assert len(ledger) == ENTRIES_MAX
