"""Histories of optimizers whose calls to other peers a test makes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from averaging.optim.history import RunHistory
from swarm.core.clock import SystemClock
from swarm.core.errors import NetworkError
from swarm.core.ids import Address, Contact
from swarm.core.standing import PeerStanding
from swarm.testing.identities import SeededIdentity

HEAD = b"h" * 32


class Calls:
    """Calls to peers whose hosts refuse connections."""

    async def call(self, contact: Contact, method: Any, request: Any, *, timeout_s: float) -> Any:
        raise NetworkError(f"cannot reach {contact.peer_id}: Connection refused")


def contact(number: int) -> Contact:
    return Contact(SeededIdentity(number).peer_id, (Address("127.0.0.1", 1000 + number),))


def history_with(calls: Any, number: int = 1, *, knows: Sequence[int] = (2,)) -> RunHistory:
    """Return the history of a peer, which calls other peers with `calls`, on the running loop. `knows`: the
    peers that its node has met.
    """
    node: Any = SimpleNamespace(
        contact=contact(number),
        channels=calls,
        network=SimpleNamespace(loop=asyncio.get_running_loop()),
        standing=PeerStanding(),
        clock=SystemClock(),
        peers=lambda: [contact(one) for one in knows],
        dht=SimpleNamespace(
            service=SimpleNamespace(companions=SimpleNamespace(named_by=lambda run, introducers: []))
        ),
    )
    return RunHistory(node, "run", SeededIdentity(number).sign, group_size_max=64)
