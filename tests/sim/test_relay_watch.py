"""Asking peers that a monitor meets whether they relay: which, how often, and what is shown of it."""

from __future__ import annotations

import asyncio

from swarm.core.errors import NetworkError
from swarm.core.ids import Address, Contact, PeerId
from swarm.monitor.relays import RelayWatch
from swarm.net.hello import Introduction
from swarm.net.logic.relay_counts import RelayCounts
from swarm.testing.identities import SeededIdentity
from swarm.testing.virtual_loop import VirtualClock, run_virtual

CONTACTS = [
    Contact(SeededIdentity(number).peer_id, (Address("9.9.9.9", 4000 + number),)) for number in range(40)
]
BUSY = RelayCounts(reservations=3, circuits=2, carried_bytes=5_000_000, refused=1)
IDLE = RelayCounts(reservations=0, circuits=0, carried_bytes=0, refused=0)


class Peers:
    """Peers of which some relay, and some are dead."""

    def __init__(self, relays: dict[PeerId, RelayCounts]) -> None:
        self.relays = relays
        self.dead: set[PeerId] = set()
        self.asked: list[PeerId] = []

    async def introduce(self, contact: Contact, *, timeout_s: float) -> Introduction:
        """Answer a Hello."""
        self.asked.append(contact.peer_id)
        if contact.peer_id in self.dead:
            raise NetworkError("it does not answer")
        counts = self.relays.get(contact.peer_id)
        port = 4001 if counts is not None else 0
        return Introduction(contact=contact, agent="", round_trip_s=0.1, relay_port=port, relayed=counts)


def test_relays_are_found_among_all_peers_and_dropped_when_they_are_gone() -> None:
    async def steps() -> None:
        entry, far = CONTACTS[0].peer_id, CONTACTS[30].peer_id
        peers = Peers({entry: IDLE, far: BUSY})
        watch = RelayWatch(peers, VirtualClock())
        for _ in range(10):
            await watch.ask(CONTACTS[:1], CONTACTS[1:])
            await watch.ask(CONTACTS[:1], CONTACTS[1:])  # not due
            await asyncio.sleep(10.0)
        first, second = watch.views()
        assert (first.peer_id, first.reservations, first.circuits) == (str(far), 3, 2)
        assert (first.carried_bytes, first.refused, second.peer_id) == (5_000_000, 1, str(entry))
        assert len(peers.asked) <= 10 * 6
        peers.dead.add(far)
        await watch.ask(CONTACTS[:1], CONTACTS[1:])
        await asyncio.sleep(10.0)
        assert watch.views()[0].age_s >= 20.0
        for _ in range(5):
            await asyncio.sleep(10.0)
            await watch.ask(CONTACTS[:1], CONTACTS[1:])
        assert [one.peer_id for one in watch.views()] == [str(entry)]
        peers.relays.clear()
        await asyncio.sleep(10.0)
        await watch.ask(CONTACTS[:1], CONTACTS[1:])
        assert watch.views() == ()

    run_virtual(steps())


def test_no_more_than_sixteen_relays_are_kept() -> None:
    async def steps() -> None:
        watch = RelayWatch(Peers(dict.fromkeys([one.peer_id for one in CONTACTS], BUSY)), VirtualClock())
        for _ in range(12):
            await watch.ask((), CONTACTS)
            await asyncio.sleep(10.0)
        assert len(watch.views()) == 16

    run_virtual(steps())
