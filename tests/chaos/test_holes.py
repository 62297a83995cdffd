"""Hole punching through routers of every kind, in network namespaces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.namespaces import Internet, Process, RouterKind, missing

pytestmark = [
    pytest.mark.network_namespaces,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

# A node that says how it is reached and to whom it has punched a hole, and calls the PeerIDs on its input.
PEER = """
import json, logging, sys, time, swarm
from swarm.net.hello import HELLO
from swarm.wire.peer_pb2 import Hello
from swarm.core.ids import Contact, PeerId
def show(**event): sys.stdout.write(json.dumps(event) + "\\n")  # one write: two threads do
class Shown(logging.Handler):
    def emit(self, record): show(event="log", text=record.getMessage())
logging.getLogger("swarm.libp2p.punching").addHandler(Shown())
logging.getLogger("swarm.libp2p.punching").setLevel(logging.INFO)
with swarm.Node(bootstrap=sys.argv[2:], listen=sys.argv[1]) as node:
    def tell(text=""):
        contact = [str(node.peer_id), *node.contact.published]
        show(event="reach", verdict=node.reach, contact=contact)
    node.tell_reach(tell)
    node.at_announced(tell)
    for line in sys.stdin:
        peer_id, *published = json.loads(line)
        contact = Contact.of_published(PeerId.parse(peer_id), published)
        request = Hello(contact={"peer_id": node.peer_id.to_bytes()})
        started_s = time.monotonic()
        try:
            node.network.run(node.channels.call(contact, HELLO, request, timeout_s=30.0))
            show(event="called", whom=peer_id, why="", seconds=time.monotonic() - started_s)
        except swarm.NetworkError as error:
            show(event="called", whom=peer_id, why=str(error), seconds=time.monotonic() - started_s)
"""
KINDS: tuple[RouterKind | None, ...] = (None, "cone", "preserving", "symmetric", "relay-only")


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


def entry_point(internet: Internet) -> tuple[Process, str]:
    """Start a relay, and return it and its address."""
    internet.public("r")
    command = ("-m", "swarm.cli", "bootstrap", "--identity", "new", "--json", "--exit-with-parent")
    entry = internet.start("r", *command)
    return entry, entry.wait("address", lambda event: event["event"] == "listening")["addresses"][0]


def peer(internet: Internet, name: str, kind: RouterKind | None, address: str) -> Process:
    """Start a node behind a router of this kind; None: behind none."""
    if kind is None:
        internet.public(name)
    else:
        internet.behind_router(name, kind)
    port = 4000 if kind is None else 4100  # the router that lets out few ports is to let out no more
    return internet.start(name, "-c", PEER, f"0.0.0.0:{port}", address)


def contact_of(process: Process) -> list[str]:
    """Wait until others can call a peer, and return how."""
    reached: list[str] = process.wait(
        "contact", lambda event: event["event"] == "reach" and len(event["contact"]) > 1
    )["contact"]
    return reached


def call(caller: Process, contact: list[str]) -> dict[str, Any]:
    """Make a node call another one, and return how that went."""
    before = [id(event) for event in caller.events]
    caller.tell(json.dumps(contact))
    return caller.wait(
        "outcome", lambda event: event["event"] == "called" and id(event) not in before, timeout_s=60.0
    )


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
def test_every_pair_of_routers_is_crossed_and_by_a_direct_way_where_there_is_one(internet: Internet) -> None:
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
