"""The verdict whether others can call this peer, with and without their answers."""

from __future__ import annotations

import math

import pytest

from swarm.core.ids import Address, Contact, PeerId
from swarm.net.logic.reachability import ASKED_MAX, CHECK_S, RETRY_S, DialedBack, Reachability
from swarm.testing.chance import Chance
from swarm.testing.identities import SeededIdentity

PORT, HOME, ELSEWHERE = 4000, "44.9.0.2", "44.8.0.2"
PEERS = [SeededIdentity(f"peer {number}").peer_id for number in range(8)]


def failed(peer: PeerId, observed: str = HOME) -> DialedBack:
    return DialedBack(peer, observed, False)


def reached(peer: PeerId, observed: str = HOME) -> DialedBack:
    return DialedBack(peer, observed, True)


def direct(by: PeerId = PEERS[0]) -> Reachability:
    machine = Reachability(PORT, 0.0)
    machine.on_answers([reached(by)], 3, 1.0)
    return machine


def test_a_peer_that_nobody_has_called_announces_nothing() -> None:
    machine = Reachability(PORT, 0.0)
    assert (machine.reach.verdict, machine.reach.addresses, machine.due_s) == ("unknown", (), 0.0)
    machine.on_answers([], 3, 5.0)  # nobody answered
    assert (machine.reach.verdict, machine.due_s) == ("unknown", 5.0 + RETRY_S)


def test_one_peer_that_has_called_is_enough() -> None:
    machine = Reachability(PORT, 0.0)
    machine.on_answers([failed(PEERS[1]), reached(PEERS[0]), failed(PEERS[2])], 3, 7.0)
    assert machine.reach.verdict == "direct"
    assert machine.reach.addresses == (Address(HOME, PORT),)
    assert (machine.reach.since_s, machine.reach.by) == (7.0, (PEERS[0],))
    assert machine.due_s == 7.0 + CHECK_S
    machine.on_answers([reached(PEERS[3])], 3, 600.0)
    assert (machine.reach.since_s, machine.reach.by) == (7.0, (PEERS[3],))


@pytest.mark.parametrize("askable", [1, 2, 3, 8])
def test_a_new_peer_is_hidden_after_failures_of_three_peers_or_of_all_available(askable: int) -> None:
    machine = Reachability(PORT, 0.0)
    enough = min(askable, 3)
    for number in range(enough):
        assert machine.reach.verdict == "unknown"
        machine.on_answers([failed(PEERS[number])], askable, float(number))
    assert machine.reach.verdict == "hidden"
    assert machine.reach.by == tuple(PEERS[:enough])


def test_a_callable_peer_becomes_hidden_after_failures_of_three_peers() -> None:
    machine = direct()
    machine.on_answers([failed(PEERS[0]), failed(PEERS[1])], 5, 601.0)
    machine.on_answers([failed(PEERS[0]), failed(PEERS[1])], 5, 616.0)
    assert machine.reach.verdict == "direct", "two peers, however often they say so"
    machine.on_answers([failed(PEERS[2])], 5, 631.0)
    assert (machine.reach.verdict, machine.reach.addresses, machine.reach.since_s) == ("hidden", (), 631.0)


def test_one_peer_that_is_alone_fails_three_times_before_it_is_believed() -> None:
    machine = direct()
    for at_s in (601.0, 616.0):
        machine.on_answers([failed(PEERS[0])], 1, at_s)
        assert (machine.reach.verdict, machine.due_s) == ("direct", at_s + RETRY_S)
    machine.on_answers([failed(PEERS[0])], 1, 631.0)
    assert machine.reach.verdict == "hidden"


def test_a_success_forgets_the_failures_before() -> None:
    machine = direct()
    machine.on_answers([failed(PEERS[0]), failed(PEERS[1])], 5, 601.0)
    machine.on_answers([reached(PEERS[2])], 5, 616.0)
    for at_s in (1216.0, 1231.0, 1246.0):
        machine.on_answers([failed(PEERS[3])], 5, at_s)
    assert machine.reach.verdict == "direct"


def test_a_hidden_peer_that_is_called_again_is_direct() -> None:
    machine = Reachability(PORT, 0.0)
    for at_s in (0.0, 15.0):  # few can be asked: a packet may have been lost
        machine.on_answers([failed(PEERS[0])], 1, at_s)
        assert (machine.reach.verdict, machine.due_s) == ("hidden", at_s + RETRY_S)
    machine.on_answers([failed(PEERS[0])], 1, 30.0)
    assert (machine.reach.verdict, machine.due_s) == ("hidden", 30.0 + CHECK_S)
    machine.on_answers([reached(PEERS[0])], 1, 600.0)
    assert (machine.reach.verdict, machine.reach.since_s) == ("direct", 600.0)


def test_a_new_peer_with_three_failed_calls_checks_at_the_interval_of_a_certain_verdict() -> None:
    machine = Reachability(PORT, 0.0)
    machine.on_answers([failed(peer) for peer in PEERS[:3]], 8, 2.0)
    assert (machine.reach.verdict, machine.due_s) == ("hidden", 2.0 + CHECK_S)


def test_answers_about_private_addresses_say_nothing() -> None:
    machine = Reachability(PORT, 0.0)
    for host in ("192.168.1.7", "127.0.0.1"):
        machine.on_answers([reached(PEERS[0], host), failed(PEERS[1], host)], 2, 1.0)
        assert machine.reach.verdict == "unknown"


def test_another_address_is_checked_and_ends_the_verdict_when_two_peers_see_it() -> None:
    machine = direct()
    machine.on_observed(PEERS[1], HOME, 100.0)
    machine.on_observed(PEERS[1], "2600::1", 100.0)  # of another IP version: no other address
    assert machine.due_s == 1.0 + CHECK_S
    for _ in range(3):
        machine.on_observed(PEERS[1], ELSEWHERE, 100.0)
    assert (machine.reach.verdict, machine.due_s) == ("direct", 100.0)
    machine.on_observed(PEERS[2], ELSEWHERE, 101.0)
    assert (machine.reach.verdict, machine.reach.addresses) == ("unknown", ())
    machine.on_answers([reached(PEERS[0], ELSEWHERE)], 3, 102.0)
    assert machine.reach.addresses == (Address(ELSEWHERE, PORT),)


def test_one_liar_makes_a_peer_check_at_most_every_fifteen_seconds() -> None:
    machine = direct()
    for number in range(100):
        machine.on_observed(PEERS[1], f"44.7.0.{number}", 2.0)
    assert (machine.reach.verdict, machine.due_s) == ("direct", 1.0 + RETRY_S)


def test_addresses_of_both_ip_versions_are_announced_after_both_were_called() -> None:
    machine = direct()
    machine.on_answers([reached(PEERS[1], "2600::1")], 3, 10.0)
    assert set(machine.reach.addresses) == {Address(HOME, PORT), Address("2600::1", PORT)}


def test_presumed_addresses_hold_until_others_have_failed_there() -> None:
    presumed = (Address(HOME, PORT),)
    machine = Reachability(PORT, 0.0, presumed)
    assert (machine.reach.verdict, machine.reach.addresses, machine.reach.by) == ("direct", presumed, ())
    machine.on_answers([failed(peer) for peer in PEERS[:3]], 3, 1.0)
    assert machine.reach.verdict == "hidden"


def test_a_peer_without_answers_asks_the_first_peer_that_it_meets_at_once() -> None:
    machine = Reachability(PORT, 0.0)
    machine.on_answers([], 3, 5.0)
    machine.on_candidate(6.0)
    assert machine.due_s == 6.0
    machine.on_answers([failed(PEERS[0])], 3, 7.0)
    machine.on_candidate(8.0)
    assert machine.due_s == 7.0 + RETRY_S, "peers answer once in ten seconds"
    machine = direct()
    machine.on_candidate(2.0)
    assert machine.due_s == 1.0 + CHECK_S


def test_a_peer_whose_machine_lost_an_address_announces_it_no_longer_and_asks() -> None:
    machine = direct()
    machine.on_interfaces([Address(ELSEWHERE, PORT)], [HOME], 100.0)
    assert (machine.reach.verdict, machine.reach.addresses) == ("unknown", ())
    assert (machine.reach.since_s, machine.due_s) == (100.0, 100.0)


def test_a_peer_behind_a_router_keeps_its_verdict_and_asks_when_its_machine_moves() -> None:
    machine = direct()
    machine.on_interfaces([], ["192.168.1.7"], 5.0)
    assert machine.reach.addresses == (Address(HOME, PORT),)
    assert machine.due_s == 1.0 + RETRY_S
    machine = Reachability(PORT, 0.0)
    machine.on_answers([failed(peer) for peer in PEERS[:3]], 3, 0.0)
    machine.on_interfaces([], ["192.168.1.7"], 100.0)
    assert (machine.reach.verdict, machine.due_s) == ("hidden", 100.0)


def test_a_router_that_may_forward_the_port_triggers_a_check_unless_others_can_call_already() -> None:
    machine = Reachability(PORT, 0.0)
    machine.on_answers([failed(peer) for peer in PEERS[:3]], 3, 5.0)
    assert (machine.reach.verdict, machine.due_s) == ("hidden", 5.0 + CHECK_S)
    machine.on_router(6.0)
    assert machine.due_s == 5.0 + RETRY_S
    machine = direct()
    machine.on_router(6.0)
    assert machine.due_s == 1.0 + CHECK_S


def test_failures_in_another_network_do_not_count() -> None:
    machine = direct()
    machine.on_answers([failed(PEERS[0]), failed(PEERS[1])], 5, 601.0)
    machine.on_interfaces([], ["192.168.1.7"], 602.0)
    machine.on_answers([failed(PEERS[2])], 5, 616.0)
    assert machine.reach.verdict == "direct"


@pytest.mark.parametrize("now", [(), (Address(ELSEWHERE, PORT),)])
def test_presumed_addresses_are_those_that_the_machine_has_now(now: tuple[Address, ...]) -> None:
    machine = Reachability(PORT, 0.0, (Address(HOME, PORT),))
    machine.on_interfaces(now, [HOME], 1.0)
    assert (machine.reach.verdict, machine.reach.addresses) == ("direct" if now else "unknown", now)


def test_the_address_is_announced_with_the_port_that_others_were_asked_to_call() -> None:
    machine = Reachability(PORT, 0.0)
    machine.port = 4711  # which a router forwards
    machine.on_answers([reached(PEERS[0])], 3, 1.0)
    assert machine.reach.addresses == (Address(HOME, 4711),)


def test_peers_of_different_networks_are_asked_those_that_have_not_failed_first() -> None:
    hosts = ["44.1.0.2", "44.1.9.9", "44.2.0.2", "example.org", "44.3.0.2"]
    contacts = [Contact(peer, (Address(host, 1),)) for peer, host in zip(PEERS, hosts, strict=False)]
    machine = Reachability(PORT, 0.0)
    assert machine.choose(contacts) == [contacts[0], contacts[2], contacts[3]]
    machine.on_answers([failed(PEERS[0])], 5, 1.0)
    assert machine.choose(contacts) == [contacts[1], contacts[2], contacts[3]]
    assert machine.choose([]) == []


@pytest.mark.parametrize("seed", range(20))
def test_two_liars_neither_hide_a_peer_that_others_call_nor_announce_another_address(seed: int) -> None:
    """One liar reports a failure, the other a call to a third party's address. Claims do not prove a call: it
    must arrive here.
    """
    chance = Chance("liars", seed)
    liars, is_open = set(PEERS[:2]), chance.random() < 0.5
    contacts = [Contact(peer, (Address(f"44.{place}.0.2", 1),)) for place, peer in enumerate(PEERS)]
    machine, now_s = Reachability(PORT, 0.0), 0.0
    for _ in range(50):
        now_s = max(now_s, machine.due_s) + chance.random()
        asked = machine.choose(chance.sample(contacts, len(contacts)))
        assert len(asked) == ASKED_MAX
        answers = [DialedBack(one.peer_id, HOME, is_open and one.peer_id not in liars) for one in asked]
        answers = [
            reached(PEERS[0], ELSEWHERE) if is_open and one.peer == PEERS[0] else one for one in answers
        ]
        machine.on_answers(answers, len(contacts), now_s)
        assert machine.reach.verdict == ("direct" if is_open else "hidden")
        assert machine.reach.addresses == ((Address(HOME, PORT),) if is_open else ())


def test_a_peer_that_listens_on_loopback_only_is_hidden_and_asks_no_peer() -> None:
    machine = Reachability(PORT, 0.0, is_closed=True)
    machine.on_candidate(1.0)
    machine.on_observed(PEERS[0], HOME, 1.0)
    assert (machine.reach.verdict, machine.reach.by, machine.due_s) == ("hidden", (), math.inf)
