"""Hole punching through routers of every kind, in network namespaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.namespaces import Internet, Process, RouterKind, missing
from tests.chaos.reach_peers import call, contact_of, entry_point, peer

pytestmark = [
    pytest.mark.network_namespaces,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

KINDS: tuple[RouterKind | None, ...] = (None, "cone", "preserving", "symmetric", "relay-only")


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


def has_punched(process: Process, contact: list[str]) -> bool:
    """Return whether a node has said that it has punched a hole to this peer."""
    said = f"{contact[0][-8:]} is called directly"
    return any(event["event"] == "log" and said in event["text"] for event in process.events)


def can_be_punched(one: RouterKind | None, other: RouterKind | None) -> bool:
    """Return whether a hole can be punched between two such routers."""
    if None in (one, other):
        return True
    if "relay-only" in (one, other):
        return False
    return "cone" in (one, other) or (one, other) == ("preserving", "preserving")


@pytest.mark.chaos
def test_every_pair_of_routers_can_connect_and_directly_if_possible(internet: Internet) -> None:
    relay, address = entry_point(internet)
    callers = {kind: peer(internet, f"{number}a", kind, address) for number, kind in enumerate(KINDS)}
    callees = {kind: peer(internet, f"{number}b", kind, address) for number, kind in enumerate(KINDS)}
    contacts = {kind: contact_of(process) for kind, process in callees.items()}
    assert [len(contact) > 1 and "p2p-circuit" in contact[1] for contact in contacts.values()] == [
        kind is not None for kind in KINDS
    ]
    pairs = [(one, other) for one in KINDS for other in KINDS]
    for one, other in pairs:
        called = call(callers[one], contacts[other])
        assert called["why"] == "", (one, other, called)
    punched = [(one, other) for one, other in pairs if other is not None and can_be_punched(one, other)]
    for one, other in punched:
        callers[one].wait(
            f"hole from {one} to {other}",
            lambda _, process=callers[one], contact=contacts[other]: has_punched(process, contact),
            timeout_s=20.0,
        )
    for one, other in pairs:
        if other is not None and (one, other) not in punched:
            assert not has_punched(callers[one], contacts[other]), (one, other)
    relay.kill()
    for one, other in punched:
        called = call(callers[one], contacts[other])
        assert called["why"] == "", (one, other, called)
