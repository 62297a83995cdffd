"""One run of peers behind routers of every kind, in network namespaces: every pair of them works together."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.matrix_peers import MATRIX_PEER
from tests.chaos.namespaces import Internet, Process, RouterKind, missing
from tests.chaos.reach_peers import contact_of, entry_point

pytestmark = [
    pytest.mark.network_namespaces,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

KINDS: tuple[RouterKind | None, ...] = (None, "cone", "preserving", "symmetric", "relay-only")
ROUNDS = 3  # of all five, that each peer takes part in and contributes to


@pytest.fixture
def internet() -> Iterator[Internet]:
    with Internet() as made:
        yield made


def matrix_peer(internet: Internet, number: int, kind: RouterKind | None, address: str) -> Process:
    """Start a peer behind a router of this kind; None: behind none."""
    name = f"p{number}"
    if kind is None:
        internet.public(name)
    else:
        internet.behind_router(name, kind)
    # this router permits few outgoing ports, so use one of them
    port = 4000 if kind is None else 4100
    return internet.start(name, "-c", MATRIX_PEER, str(number), f"0.0.0.0:{port}", address)


def rounds_of_all(process: Process) -> list[dict[str, Any]]:
    """Return the rounds of all five to which a peer has contributed."""
    rounds = [event for event in process.events if event["event"] == "round"]
    return [one for one in rounds if one["peers"] == len(KINDS) and one["contributed"] > 0]


@pytest.mark.chaos
def test_every_pair_of_routers_trains_in_one_run_calls_reads_state_and_calls_experts(
    internet: Internet,
) -> None:
    _, address = entry_point(internet)
    peers = [matrix_peer(internet, number, kind, address) for number, kind in enumerate(KINDS)]
    contacts = [contact_of(peer) for peer in peers]
    assert ["p2p-circuit" in contact[1] for contact in contacts] == [kind is not None for kind in KINDS]
    for peer in peers:
        peer.tell("train")
    for number, peer in enumerate(peers):
        peer.wait(
            f"rounds of {KINDS[number]}", lambda _, of=peer: len(rounds_of_all(of)) >= ROUNDS, timeout_s=120.0
        )

    states: dict[int, set[str]] = defaultdict(set)  # digests of the states of each epoch, of all donors
    for number, peer in enumerate(peers):
        others = [other for other in range(len(KINDS)) if other != number]
        for other in others:
            peer.tell(json.dumps([other, contacts[other]]))
        for other in others:
            pair = (KINDS[number], KINDS[other])
            did = peer.wait(
                f"work of {pair}",
                lambda event, o=other: event["event"] == "did" and event["other"] == o,
                120.0,
            )
            assert did["why"] == "", (pair, did)
            assert did["call"], pair
            donors, epoch, _, digest = did["state"]
            assert donors == [contacts[other][0]], pair
            states[epoch].add(digest)
            assert did["expert"] == [[float(other * value) for value in range(8)]], pair
    assert all(len(found) == 1 for found in states.values()), states

    parameters: dict[int, set[str]] = defaultdict(set)
    for peer in peers:
        for one in rounds_of_all(peer):
            parameters[one["epoch"]].add(one["digest"])
    assert all(len(found) == 1 for found in parameters.values()), parameters
