"""How often a peer that waits asks others for their histories, in virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from averaging.history.chain import Chain
from averaging.optim.history import RunHistory
from swarm.core.errors import NetworkError
from swarm.core.ids import Address, Contact, PeerId
from swarm.core.standing import PeerStanding
from swarm.testing.identities import SeededIdentity
from swarm.testing.virtual_loop import VirtualClock, run_virtual

OWN, *ELECTORS = (
    Contact(SeededIdentity(number).peer_id, (Address("127.0.0.1", 1000 + number),)) for number in (1, 2, 3)
)


class Busy:
    """Calls to peers that do not answer in time."""

    def __init__(self) -> None:
        self.asked: list[PeerId] = []

    async def call(self, contact: Contact, method: Any, request: Any, *, timeout_s: float) -> Any:
        self.asked.append(contact.peer_id)
        raise NetworkError("no answer in time")


def test_a_peer_that_waits_for_a_quorum_asks_each_elector_once_a_second() -> None:
    """Regression test: it asked at every read of the reports, about six times a second."""

    async def play() -> None:
        clock, calls = VirtualClock(), Busy()
        node: Any = SimpleNamespace(
            contact=OWN,
            channels=calls,
            network=SimpleNamespace(loop=asyncio.get_running_loop()),
            peers=lambda: ELECTORS,
            standing=PeerStanding(),
            clock=clock,
        )
        history = RunHistory(node, "run", SeededIdentity(1).sign, group_size_max=64)
        electors = tuple(one.peer_id for one in ELECTORS)
        history.restore(Chain(head=b"h" * 32, electors=electors, certificates=()))
        while clock.monotonic_s() < 5.0:
            for one in ELECTORS:
                history.heard(one, b"x" * 32)
            history.seek_quorum((), clock.monotonic_s(), 0.5)
            await history.compare()
            await asyncio.sleep(0.15)
        for elector in electors:
            assert 4 <= calls.asked.count(elector) <= 5

    run_virtual(play())
