"""Tests of what a relay grants, and of how a hidden peer keeps its reservations: pure, in virtual time."""

from __future__ import annotations

import math
import random

import pytest

from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, PeerId
from swarm.core.standing import PeerStanding
from swarm.libp2p.logic.admission import (
    CONNECTIONS_PER_PEER_MAX,
    CONNECTIONS_PER_PREFIX_MAX,
    HANDLERS_MAX,
    HANDLERS_PER_PREFIX_MAX,
    HANDSHAKES_MAX,
    HANDSHAKES_PER_PREFIX_MAX,
    HANDSHAKES_PER_RELAY_MAX,
    ConnectionCounts,
    through,
)
from swarm.libp2p.logic.messages import Status
from swarm.libp2p.logic.relaying import RelayLimits, RelayState
from swarm.libp2p.logic.reserving import LIFE_S_MIN, RELAYS_MAX, WANTED, Reservations

PEERS = [PeerId(bytes([number]) * 32) for number in range(1, 250)]


def host(number: int) -> str:
    return f"198.51.{number}.1"


def relay(**limits: float) -> RelayState:
    return RelayState(RelayLimits(**limits), PeerStanding())


def test_reservations_are_limited_in_all_and_of_one_network_and_expire() -> None:
    one = relay(reservations_max=3, reservations_per_prefix_max=2, reservation_s=60.0)
    assert one.reserve(PEERS[0], host(1), 0.0).status is Status.OK
    assert one.reserve(PEERS[1], host(1), 0.0).status is Status.OK
    assert one.reserve(PEERS[2], host(1), 0.0).status is Status.RESERVATION_REFUSED
    assert one.reserve(PEERS[2], host(2), 0.0).status is Status.OK
    assert one.reserve(PEERS[3], host(3), 0.0).status is Status.RESERVATION_REFUSED
    assert one.reserve(PEERS[0], host(1), 50.0).status is Status.OK  # a renewal
    assert one.reserve(PEERS[3], host(3), 61.0).status is Status.OK
    assert set(one.reservations(61.0)) == {PEERS[0], PEERS[3]}


def test_strangers_get_half_of_the_reservations_where_members_are_known() -> None:
    standing = PeerStanding()
    standing.add_members("run", PEERS[100:110])
    one = RelayState(RelayLimits(reservations_max=8), standing)
    given = [one.reserve(PEERS[number], host(number), 0.0).status is Status.OK for number in range(8)]
    assert given == [True] * 4 + [False] * 4
    assert [one.reserve(PEERS[100 + n], host(100 + n), 0.0).status for n in range(4)] == [Status.OK] * 4


def test_a_circuit_needs_a_reservation_of_its_target() -> None:
    one = relay()
    assert one.connect(PEERS[0], PEERS[1], 0.0).status is Status.NO_RESERVATION
    one.reserve(PEERS[1], host(1), 0.0)
    assert one.connect(PEERS[0], PEERS[1], 0.0).status is Status.OK
    one.leave(PEERS[1])
    assert one.connect(PEERS[0], PEERS[1], 0.0).status is Status.NO_RESERVATION
    assert one.connect(PEERS[0], PEERS[0], 0.0).status is Status.PERMISSION_DENIED
    assert one.connect(PEERS[0], None, 0.0).status is Status.MALFORMED_MESSAGE
    assert one.refused[Status.NO_RESERVATION] == 2


def test_circuits_are_limited_for_callers_for_targets_and_in_all() -> None:
    one = relay(circuits_max=5, circuits_per_peer_max=2)
    for number in range(1, 4):
        one.reserve(PEERS[number], host(number), 0.0)
    held = [one.connect(PEERS[0], PEERS[1], 0.0), one.connect(PEERS[0], PEERS[2], 0.0)]
    assert one.connect(PEERS[0], PEERS[3], 0.0).status is Status.RESOURCE_LIMIT_EXCEEDED  # of the caller
    assert one.connect(PEERS[4], PEERS[1], 0.0).status is Status.OK
    assert one.connect(PEERS[5], PEERS[1], 0.0).status is Status.RESOURCE_LIMIT_EXCEEDED  # of the target
    assert one.connect(PEERS[6], PEERS[3], 0.0).status is Status.OK
    assert one.connect(PEERS[7], PEERS[3], 0.0).status is Status.OK
    assert one.connect(PEERS[8], PEERS[2], 0.0).status is Status.RESOURCE_LIMIT_EXCEEDED  # of all
    for decision in held:
        one.end(decision.circuit)
        one.end(decision.circuit)
    assert one.circuits == 3
    assert one.connect(PEERS[8], PEERS[2], 0.0).status is Status.OK


def test_ending_one_circuit_of_a_peer_leaves_its_others() -> None:
    one = relay()
    one.reserve(PEERS[1], host(1), 0.0)
    first, second = (one.connect(PEERS[0], PEERS[1], 0.0).circuit for _ in range(2))
    one.end(first)
    assert one.circuits == 1
    one.pass_s(second, 10, 0.0)
    assert second.carried_bytes == 10


@pytest.mark.parametrize("seed", range(20))
def test_no_more_bytes_pass_than_the_rate_allows_and_each_circuit_gets_its_part(seed: int) -> None:
    rng = random.Random(seed)
    one = relay(bytes_per_s=1e6, burst_s=0.5)
    one.reserve(PEERS[1], host(1), 0.0)
    circuits = [one.connect(PEERS[2 + n], PEERS[1], 0.0).circuit for n in range(5)]
    ready = [0.0] * 5
    passed = [0] * 5
    while (turn := min(range(5), key=lambda n: ready[n])) is not None and ready[turn] < 10.0:
        size = rng.randint(1, 65_000)
        ready[turn] += one.pass_s(circuits[turn], size, ready[turn])
        if ready[turn] <= 10.0:
            passed[turn] += size
    assert sum(passed) <= 1e6 * 10.5
    assert min(passed) > 1e6  # each gets about a fifth


def test_the_rate_of_the_last_second_without_bytes_is_free_for_the_next_round() -> None:
    one = relay(bytes_per_s=1e6)
    one.reserve(PEERS[1], host(1), 0.0)
    circuit = one.connect(PEERS[2], PEERS[1], 0.0).circuit
    assert one.pass_s(circuit, 1_000_000, 100.0) == 0.0
    assert one.pass_s(circuit, 1_000_000, 100.0) == pytest.approx(1.0)
    # Capacity that was unused for longer is lost: the owner's link is never busier than a second's burst and
    # the rate.
    assert one.pass_s(circuit, 3_000_000, 200.0) == pytest.approx(2.0)


def contact(number: int, network: int | None = None) -> Contact:
    return Contact(PEERS[number], (Address(f"198.{network if network is not None else number}.0.1", 4001),))


def test_two_reservations_are_held_in_different_networks_and_renewed_at_half_life() -> None:
    kept = Reservations()
    kept.offer([contact(1, 10), contact(2, 10), contact(3, 20)])
    asked = kept.due(0.0)
    assert [one.peer_id for one in asked] == [PEERS[1], PEERS[3]]
    assert kept.due(0.0) == []
    for one in asked:
        kept.granted(one.peer_id, 600.0, 0.01, 1.0)
    assert kept.next_s(1.0) == 301.0
    assert kept.due(300.0) == []
    assert {one.peer_id for one in kept.due(301.0)} == {PEERS[1], PEERS[3]}
    assert len(kept.held(301.0)) == WANTED


def test_a_dead_relay_is_replaced_at_once_and_asked_again_after_a_pause() -> None:
    kept = Reservations()
    kept.offer([contact(1), contact(2), contact(3)])
    for one in kept.due(0.0):
        kept.granted(one.peer_id, 600.0, None, 0.0)
    kept.failed(PEERS[1], 10.0)
    assert [one.peer_id for one in kept.held(10.0)] == [PEERS[2]]
    assert [one.peer_id for one in kept.due(10.0)] == [PEERS[3]]
    kept.failed(PEERS[3], 10.0)
    assert kept.due(10.5) == []
    assert kept.next_s(10.5) == 11.0
    assert [one.peer_id for one in kept.due(11.0)] == [PEERS[1]]


def test_the_lifetime_of_a_reservation_that_a_relay_claims_is_bounded() -> None:
    kept = Reservations()
    kept.offer([contact(1), contact(2)])
    kept.due(0.0)
    kept.granted(PEERS[1], -1e9, None, 0.0)
    kept.granted(PEERS[2], 1e18, None, 0.0)
    assert kept.next_s(0.0) == LIFE_S_MIN / 2
    assert {one.peer_id for one in kept.due(3600.0)} == {PEERS[1], PEERS[2]}


def test_relays_that_are_offered_without_end_are_not_all_remembered() -> None:
    kept = Reservations()
    kept.offer([contact(1)])
    kept.due(0.0)
    kept.granted(PEERS[1], 3600.0, None, 0.0)
    kept.offer([contact(number) for number in range(2, 240)])
    asked = 0
    for _ in range(1000):
        for one in kept.due(0.0):
            asked += 1
            kept.failed(one.peer_id, 0.0)
    assert asked < RELAYS_MAX
    assert [one.peer_id for one in kept.held(0.0)] == [PEERS[1]]


@pytest.mark.parametrize("seed", range(30))
def test_a_peer_is_callable_whenever_two_relays_have_lived_for_a_while(seed: int) -> None:
    """Relays die and come back; answers take a second. Of 200 minutes the peer is without a relay for less
    than the pauses between its tries."""
    rng = random.Random(seed)
    kept = Reservations()
    relays = [contact(number) for number in range(6)]
    alive = {one.peer_id: True for one in relays}
    kept.offer(relays)
    pending: list[tuple[float, PeerId]] = []
    without = 0
    for second in range(12_000):
        now = float(second)
        if rng.random() < 0.01:
            flipped = rng.choice(relays).peer_id
            alive[flipped] = not alive[flipped] or sum(alive.values()) <= 2
            if not alive[flipped] and any(one.peer_id == flipped for one in kept.held(now)):
                kept.failed(flipped, now)
        for one in [one for one in pending if one[0] <= now]:
            pending.remove(one)
            if alive[one[1]]:
                kept.granted(one[1], 600.0, None, now)
            else:
                kept.failed(one[1], now)
        pending += [(now + 1.0, one.peer_id) for one in kept.due(now)]
        held = [one for one in kept.held(now) if alive[one.peer_id]]
        assert len(kept.held(now)) <= WANTED + 1
        without += not held
        assert kept.next_s(now) > now or kept.next_s(now) == math.inf
    assert without < 240


def test_connections_and_handshakes_are_limited_by_network_and_peer() -> None:
    admission = ConnectionCounts()
    assert [admission.begin("192.0.2.1") for _ in range(HANDSHAKES_PER_PREFIX_MAX)] == [""] * 16
    assert "of 192.0.2.0/24" in admission.begin("192.0.2.77")
    for number in range((HANDSHAKES_MAX - 16) // 16):
        for _ in range(16):
            assert admission.begin(host(number)) == ""
    assert "64 handshakes" in admission.begin(host(200))
    admission.end("192.0.2.1")
    assert admission.begin("192.0.2.77") == ""
    peer = Identity.generate().peer_id
    for _ in range(CONNECTIONS_PER_PEER_MAX):
        assert admission.join(peer, "192.0.2.1", is_client=False) == ""
    assert "4 connections of" in admission.join(peer, host(1), is_client=True)
    for number in range(CONNECTIONS_PER_PREFIX_MAX - CONNECTIONS_PER_PEER_MAX):
        assert admission.join(PEERS[number], "192.0.2.2", is_client=False) == ""
    assert "64 connections of" in admission.join(PEERS[-1], "192.0.2.3", is_client=False)
    assert admission.join(PEERS[-1], "192.0.2.3", is_client=True) == ""
    admission.leave(peer, "192.0.2.1", is_client=False)
    assert admission.join(PEERS[-2], "192.0.2.3", is_client=False) == ""


def test_handshakes_through_one_relay_are_limited_and_leave_room_for_those_through_another() -> None:
    admission = ConnectionCounts()
    for number in (0, 1):
        relay_ = through(PEERS[number])
        assert [admission.begin(relay_) for _ in range(HANDSHAKES_PER_RELAY_MAX)] == [""] * 32
        if number == 0:
            assert f"32 handshakes of {relay_}" in admission.begin(relay_)
    assert "64 handshakes" in admission.begin(host(1))


def test_a_relay_has_circuits_for_groups_of_twenty_hidden_peers_that_call_each_other_at_once() -> None:
    one, peers = relay(), PEERS[:20]
    for number, peer in enumerate(peers):
        assert one.reserve(peer, host(number), 0.0).status is Status.OK
    for caller in peers:
        for target in peers:
            if caller is not target:
                assert one.connect(caller, target, 0.0).status is Status.OK
    assert one.circuits == 380


def test_streams_that_are_served_are_limited_in_all_and_of_one_network() -> None:
    admission = ConnectionCounts()
    assert {admission.serve("192.0.2.1") for _ in range(HANDLERS_PER_PREFIX_MAX)} == {""}
    assert "512 streams of 192.0.2.0/24" in admission.serve("192.0.2.77")
    for number in range(3):
        assert {admission.serve(host(number)) for _ in range(HANDLERS_PER_PREFIX_MAX)} == {""}
    assert HANDLERS_MAX == 4 * HANDLERS_PER_PREFIX_MAX
    assert "2048 streams are" in admission.serve(host(200))
    admission.served("192.0.2.1")
    assert admission.serve("192.0.2.77") == ""
