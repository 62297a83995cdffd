"""Relays, peers behind them and their routers that die, freeze and change, in network namespaces."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.chaos.namespaces import Internet, Process, missing
from tests.chaos.reach_peers import call, contact_of, entry_point, peer

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.network_namespaces,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

# Twice the design's aims for a quiet machine (1 s and 5 s): the tests share their processors with others.
KILLED_S_MAX, FROZEN_S_MAX = 2.0, 10.0
FOUND_S_MAX = 90.0  # the longest pause of a search, and the relay's own start


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


def two_relays(internet: Internet) -> tuple[list[Process], str]:
    first, address = entry_point(internet, "r")
    second, _ = entry_point(internet, "s", address)
    return [first, second], address


def until_answered(caller: Process, contact: list[str], timeout_s: float = 60.0) -> float:
    """Call until there is an answer, and return how many seconds that took."""
    started_s = time.monotonic()
    while call(caller, contact)["why"]:
        assert time.monotonic() - started_s < timeout_s, caller.events[-3:]
        time.sleep(0.05)
    return time.monotonic() - started_s


@pytest.mark.parametrize(
    ("break_", "seconds_max"),
    [
        (lambda relay: relay.kill(), KILLED_S_MAX),
        (lambda relay: relay.send(signal.SIGSTOP), FROZEN_S_MAX),
    ],
    ids=["killed", "frozen"],
)
def test_calls_go_through_the_other_relay_when_one_is_lost(
    break_: Callable[[Process], None], seconds_max: float, internet: Internet
) -> None:
    relays, address = two_relays(internet)
    caller, callee = (peer(internet, name, "symmetric", address) for name in ("a", "b"))
    contact = contact_of(callee, ways=2)
    until_answered(caller, contact)
    break_(relays[0])
    assert until_answered(caller, contact) < seconds_max
    assert len(contact_of(callee, ways=1)) == 2


def test_a_peer_finds_relays_that_come_later_than_it_does(internet: Internet) -> None:
    first, address = entry_point(internet, "r")
    callee = peer(internet, "b", "symmetric", address)
    contact_of(callee, ways=1)

    def find(name: str, entry: str) -> str:
        """Start another relay, wait until the callee has a reservation there, and return its address."""
        relay, _ = entry_point(internet, name, entry)
        mine = relay.wait("address", lambda event: "others enter with" in event.get("text", ""))["text"]
        peer_id = mine.rpartition("/")[2]
        callee.wait(
            f"relay {name}",
            lambda event: any(f"/p2p/{peer_id}/p2p-circuit" in one for one in event.get("contact", ())),
            timeout_s=FOUND_S_MAX,
        )
        return str(mine.rpartition(" ")[2])

    other = find("s", address)
    first.kill()
    find("t", other)


def test_a_peer_that_was_frozen_is_called_again_once_it_goes_on(internet: Internet) -> None:
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
    getattr(internet, what)("b")
    until_answered(caller, contact)
