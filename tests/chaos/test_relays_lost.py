"""Failures, freezes and changes of relays, of peers behind them, and of their routers, in network
namespaces.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.chaos.namespaces import Internet, Process, missing
from tests.chaos.reach_peers import call, contact_of, entry_point, peer

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.network_namespaces,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

FOUND_S_MAX = 90.0  # the longest pause of a search, and the relay's own start


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


def two_relays(internet: Internet) -> tuple[list[Process], str]:
    first, address = entry_point(internet, "r")
    second, _ = entry_point(internet, "s", address)
    return [first, second], address


def until_answered(caller: Process, contact: list[str], timeout_s: float = 60.0) -> None:
    """Call until there is an answer."""
    started_s = time.monotonic()
    while call(caller, contact)["why"]:
        assert time.monotonic() - started_s < timeout_s, caller.events[-3:]
        time.sleep(0.05)


@pytest.mark.parametrize("place", [0, 1])  # calls go through one of the two
@pytest.mark.parametrize("lost", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_calls_go_through_the_other_relay_when_one_is_lost(
    lost: signal.Signals, place: int, internet: Internet
) -> None:
    """How soon, is in tests/sim/test_libp2p_round_trips.py and in the benchmarks, which no load disturbs."""
    relays, address = two_relays(internet)
    caller, callee = (peer(internet, name, "symmetric", address) for name in ("a", "b"))
    contact = contact_of(callee, ways=2)
    until_answered(caller, contact)
    before = callee.seen()
    relays[place].send(lost)
    until_answered(caller, contact)
    callee.wait(
        "one relay", lambda event: event["event"] == "reach" and len(event["contact"]) == 2, since=before
    )


def test_a_peer_finds_relays_that_come_later_than_it_does(internet: Internet) -> None:
    first, address = entry_point(internet, "r")
    callee = peer(internet, "b", "symmetric", address)
    contact_of(callee, ways=1)

    def find(name: str, entry: str) -> tuple[Process, str, list[str]]:
        """Start another relay, and wait until the callee has a reservation there. Return the relay, its
        address, and the callee's contact with that relay alone.
        """
        relay, _ = entry_point(internet, name, entry)
        mine = relay.wait("address", lambda event: "others join with" in event.get("text", ""))["text"]
        circuit = f"/p2p/{mine.rpartition('/')[2]}/p2p-circuit"
        peer_id, *ways = callee.wait(
            f"relay {name}",
            lambda event: any(circuit in one for one in event.get("contact", ())),
            timeout_s=FOUND_S_MAX,
        )["contact"]
        return relay, str(mine.rpartition(" ")[2]), [peer_id, *(one for one in ways if circuit in one)]

    second, other, _ = find("s", address)
    first.kill()
    _, last, through_last = find("t", other)
    second.kill()
    until_answered(peer(internet, "a", "symmetric", last), through_last)


def test_a_peer_that_was_frozen_is_called_again_once_it_continues(internet: Internet) -> None:
    _, address = two_relays(internet)
    caller, callee = (peer(internet, name, "symmetric", address) for name in ("a", "b"))
    contact = contact_of(callee, ways=2)
    until_answered(caller, contact)
    callee.send(signal.SIGSTOP)
    assert call(caller, contact)["why"]
    callee.send(signal.SIGCONT)
    until_answered(caller, contact)


@pytest.mark.parametrize("kind", ["symmetric", "preserving"])
@pytest.mark.parametrize("what", ["restart_router", "readdress_router"])
def test_a_peer_whose_router_forgets_its_connections_or_gets_another_address_is_called_again(
    what: str, kind: str, internet: Internet
) -> None:
    _, address = two_relays(internet)
    caller = peer(internet, "a", "symmetric", address)
    callee = peer(internet, "b", "symmetric" if kind == "symmetric" else "preserving", address)
    contact = contact_of(callee, ways=2)
    until_answered(caller, contact)
    before = internet.routers["b"]
    getattr(internet, what)("b")
    assert (internet.routers["b"] != before) is (what == "readdress_router")
    until_answered(caller, contact)
