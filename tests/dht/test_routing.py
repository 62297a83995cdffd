"""Tests of the routing table against brute force, ordered by the sections of the Kademlia paper."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.ids import Address, Contact, PeerId
from swarm.dht.logic.routing import FAR_SILENT_S_MAX, FAR_SILENT_S_MIN, ID_BITS, NEAR_SILENT_S, RoutingTable

OWN = PeerId(bytes(32))


def contact_of(number: int, port: int = 4000) -> Contact:
    return Contact(PeerId(number.to_bytes(32, "big")), (Address("127.0.0.1", port),))


def filled(count: int, seed: int = 0, **sizes: int) -> RoutingTable:
    table = RoutingTable(OWN, **sizes)
    rng = random.Random(seed)
    for now_s in range(count):
        table.on_answer(contact_of(rng.getrandbits(200) + 1), float(now_s))
    return table


def check_invariants(table: RoutingTable) -> None:
    lower = 0
    for bucket in table._buckets:
        assert bucket.lower == lower, "the ranges cover every id, once"
        lower += 1 << bucket.width_bits
        assert len(bucket.nodes) <= table.bucket_max
        assert len(bucket.replacements) <= table.bucket_max
        assert not set(bucket.nodes) & set(bucket.replacements)
        assert not bucket.replacements or len(bucket.nodes) == table.bucket_max, (
            "a bucket with room has no replacements"
        )
        for peer_id, node in (bucket.nodes | bucket.replacements).items():
            assert node.dht_id == peer_id.dht_id
            assert node.dht_id >> bucket.width_bits == bucket.lower >> bucket.width_bits
        for peer_id in bucket.nodes:
            assert table._by_peer[peer_id] is bucket
    assert lower == 1 << ID_BITS
    assert len(table) == sum(len(bucket.nodes) for bucket in table._buckets)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 400),
    seed=st.integers(0, 10**6),
    bucket_max=st.integers(1, 20),
    depth_step=st.integers(1, 5),
    target=st.integers(0, (1 << ID_BITS) - 1),
    wanted=st.integers(1, 50),
)
def test_nearest_equals_brute_force(
    count: int, seed: int, bucket_max: int, depth_step: int, target: int, wanted: int
) -> None:
    table = filled(count, seed, bucket_max=bucket_max, depth_step=depth_step)
    check_invariants(table)
    all_peers = list(table)
    assert len(all_peers) == len(table)
    expected = sorted(all_peers, key=lambda contact: contact.peer_id.dht_id ^ target)
    assert table.nearest(target, wanted) == expected[:wanted]
    if all_peers:
        hidden = expected[0].peer_id
        assert table.nearest(target, wanted, exclude=hidden) == expected[1 : wanted + 1]


def test_the_table_knows_all_of_its_nearest_peers() -> None:
    """Section 2.4: the buckets around the table's own id split, so that all of the nearest peers have
    room.
    """
    table = filled(3000)
    check_invariants(table)
    rng = random.Random(0)
    all_peers = [PeerId((rng.getrandbits(200) + 1).to_bytes(32, "big")) for _ in range(3000)]
    nearest = sorted(all_peers, key=lambda peer: peer.dht_id ^ OWN.dht_id)[:20]
    assert [contact.peer_id for contact in table.nearest(OWN.dht_id, 20)] == nearest
    assert 200 < len(table) < 3000


@pytest.mark.parametrize("seed", range(20))
def test_a_table_knows_whether_it_holds_most_peers(seed: int) -> None:
    """The estimate errs, but never so far that a table would take a swarm of a thousand for a small one."""
    assert all(filled(count, seed).knows_most for count in (0, 1, 19))
    large = filled(3000, seed)
    assert not large.knows_most
    small, hidden = filled(20, seed), filled(400, seed)
    assert small.knows_most
    for contact in list(hidden):
        small.on_answer(contact, 1000.0)
    assert small.knows_most == hidden.knows_most, "it is computed again when the table has changed"


def test_tables_of_a_swarm_of_two_buckets_mostly_know_that_they_hold_all() -> None:
    assert sum(filled(33, seed).knows_most for seed in range(100)) >= 95


def test_long_lived_peers_stay_in_a_full_bucket() -> None:
    """Section 2.2: a full bucket keeps its peers for as long as they answer; a newcomer waits, and the peer
    silent for longest is pinged.
    """
    table = RoutingTable(OWN, bucket_max=2, depth_step=1, questionable_s=0.0)
    far = [
        contact_of(number)
        for number in range(1, 400)
        if contact_of(number).peer_id.dht_id >> 255 != OWN.dht_id >> 255
    ]
    first, second, third, fourth = far[:4]
    assert table.on_answer(first, 0.0) is None
    assert table.on_answer(second, 1.0) is None
    near = [
        contact_of(number)
        for number in range(1, 40)
        if contact_of(number).peer_id.dht_id >> 255 == OWN.dht_id >> 255
    ]
    table.on_answer(near[0], 1.5)  # splits off the far half
    assert table.on_answer(third, 2.0) == first
    table.on_answer(first, 3.0)  # it answered
    assert table.on_answer(fourth, 4.0) == second
    assert {contact.peer_id for contact in table} >= {first.peer_id, second.peer_id}
    assert not table.on_failure(second.peer_id)
    assert table.on_failure(second.peer_id)
    assert second.peer_id not in table
    assert fourth.peer_id in table, "the newest replacement takes its place"
    assert table.on_failure(third.peer_id) is False
    check_invariants(table)


def test_an_answer_resets_the_failures_of_a_peer() -> None:
    table = RoutingTable(OWN)
    table.on_answer(contact_of(1), 0.0)
    assert not table.on_failure(contact_of(1).peer_id)
    table.on_answer(contact_of(1), 1.0)
    assert not table.on_failure(contact_of(1).peer_id)
    assert table.on_failure(contact_of(1).peer_id)


def test_a_new_address_replaces_the_old() -> None:
    table = RoutingTable(OWN)
    table.on_answer(contact_of(1, port=1000), 0.0)
    table.on_answer(contact_of(1, port=2000), 1.0)
    assert table.contact(contact_of(1).peer_id) == contact_of(1, port=2000)
    assert len(table) == 1


def test_own_peer_and_undialable_peers_never_enter_the_table() -> None:
    table = RoutingTable(OWN)
    table.on_answer(Contact(OWN, (Address("127.0.0.1", 1),)), 0.0)
    table.on_answer(Contact(contact_of(1).peer_id), 0.0)
    assert len(table) == 0
    assert table.contact(OWN) is None


def test_a_flood_of_identities_displaces_no_live_peer() -> None:
    """An attacker's 10,000 identities do not displace 40 peers that answer."""
    table = RoutingTable(OWN, questionable_s=0.0)
    honest = [contact_of(number) for number in range(1, 41)]
    for contact in honest:
        table.on_answer(contact, 0.0)
    for number in range(10_000):
        to_ping = table.on_answer(contact_of(1000 + number), 1.0 + number)
        if to_ping in honest:
            table.on_answer(to_ping, 1.0 + number)
    assert all(contact.peer_id in table for contact in honest)
    assert sum(len(bucket.replacements) for bucket in table._buckets) <= 20 * table.bucket_count


def test_refresh_ids_lie_in_their_buckets() -> None:
    """Section 2.3: refresh yields a random id in every bucket's range, except for full buckets, which have
    nothing to learn.
    """
    table = filled(500)
    for bucket in table._buckets:
        bucket.touched_s = 100.0
    assert table.stale_ids(50.0, random.Random(1)) == []
    targets = table.stale_ids(101.0, random.Random(1))
    with_room = [bucket for bucket in table._buckets if len(bucket.nodes) < 20]
    assert 0 < len(with_room) < table.bucket_count
    assert [table._bucket_of(target) for target in targets] == with_room
    table.touch(targets[0], 200.0)
    assert len(table.stale_ids(101.0, random.Random(1))) == len(with_room) - 1


def test_near_peers_are_pinged_often_and_others_less_and_less_often() -> None:
    """Section 2.1, figure 1: a peer that has lived long is likely to live on; the nearest peers hold the same
    keys.
    """
    table = RoutingTable(OWN, near_count=3)
    all_peers = sorted(
        (contact_of(number) for number in range(1, 16)), key=lambda one: one.peer_id.dht_id ^ OWN.dht_id
    )
    near, far = all_peers[:3], all_peers[3:]
    for contact in all_peers:
        table.on_answer(contact, 0.0)
    assert table.to_ping(59.0) == []
    assert set(table.to_ping(60.0)) == set(near)
    assert set(table.to_ping(300.0)) == set(all_peers)
    for contact in all_peers:
        table.on_answer(contact, 1000.0)  # known for 1000 s now
    assert set(table.to_ping(1999.0)) == set(near)
    assert set(table.to_ping(2000.0)) == set(all_peers)
    table.on_answer(far[0], 20_000.0)
    assert far[0] not in table.to_ping(23_599.0), "an hour is the longest"
    assert far[0] in table.to_ping(23_600.0)
    table.on_failure(far[0].peer_id)
    assert table.to_ping(20_001.0)[0] in [*near, far[0]], "a failure is looked into at once"
    assert far[0] in table.to_ping(20_001.0)


def test_a_caller_enters_the_table_only_after_it_answers_a_ping() -> None:
    """Section 2.2 takes any message as a sign of life. Here only an answer proves that a peer can be reached,
    so a call leads to a ping.
    """
    table = RoutingTable(OWN, bucket_max=2, depth_step=1, questionable_s=10.0)
    far = [
        contact_of(number)
        for number in range(1, 400)
        if contact_of(number).peer_id.dht_id >> 255 != OWN.dht_id >> 255
    ]
    near = [
        contact_of(number)
        for number in range(1, 40)
        if contact_of(number).peer_id.dht_id >> 255 == OWN.dht_id >> 255
    ]
    assert table.on_call(far[0], 0.0) == far[0]
    assert len(table) == 0
    table.on_answer(far[0], 0.0)
    assert table.on_call(far[0], 5.0) is None, "known: a sign of life"
    table.on_answer(far[1], 6.0)
    table.on_answer(near[0], 6.0)
    assert table.on_call(far[2], 7.0) is None, "no room, and all peers were seen recently"
    assert table.on_call(far[2], 15.0) == far[0]
    table.on_failure(far[0].peer_id)
    assert table.on_call(far[0], 16.0) == far[0], "it calls, but did not answer: it does not stay for calling"
    assert table.on_failure(far[0].peer_id)
    assert far[2].peer_id in table
    assert table.on_call(Contact(far[5].peer_id), 20.0) is None, "who cannot be dialed"
    check_invariants(table)


def due_by_brute_force(table: RoutingTable, near_count: int, now_s: float) -> set[PeerId]:
    found = set()
    near = {contact.peer_id for contact in table.nearest(table.own_id, near_count)}
    for bucket in table._buckets:
        for peer_id, node in bucket.nodes.items():
            known_s = min(max(node.seen_s - node.since_s, FAR_SILENT_S_MIN), FAR_SILENT_S_MAX)
            if node.failures or now_s - node.seen_s >= (NEAR_SILENT_S if peer_id in near else known_s):
                found.add(peer_id)
    return found


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    bucket_max=st.integers(1, 8),
    steps=st.integers(1, 400),
    pause_s=st.sampled_from([1.0, 20.0, 90.0]),
)
def test_peers_to_ping_equal_brute_force(seed: int, bucket_max: int, steps: int, pause_s: float) -> None:
    """The table checks only the peers that were silent for longest; joins, departures, failures and
    replacements must not hide any other.
    """
    table = RoutingTable(OWN, bucket_max=bucket_max, near_count=4, depth_step=2)
    rng, now_s = random.Random(seed), 0.0
    people = [contact_of(rng.getrandbits(200) + 1) for _ in range(60)]
    for _ in range(steps):
        now_s += pause_s * rng.random()
        contact = rng.choice(people)
        act = rng.randrange(6)
        if act < 3:
            table.on_answer(contact, now_s, proven=act > 0)
        elif act == 3:
            table.on_call(contact, now_s)
        else:
            table.on_failure(contact.peer_id, at_once=act == 5)
        due = table.to_ping(now_s)
        assert {contact.peer_id for contact in due} == due_by_brute_force(table, 4, now_s)
        assert len(due) == len(set(due))
    check_invariants(table)
    assert set(table._failing) == {
        peer_id for bucket in table._buckets for peer_id, node in bucket.nodes.items() if node.failures
    }
