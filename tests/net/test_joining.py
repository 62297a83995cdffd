"""Joining: what a node knows about peers that did not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from swarm.core.errors import NetworkError
from swarm.core.ids import Address, Contact
from swarm.net.joining import Joining
from swarm.net.peerbook import PeerBook
from swarm.testing.identities import SeededIdentity
from swarm.testing.virtual_loop import run_virtual

ENTRY = Contact(SeededIdentity(1).peer_id, (Address("127.0.0.1", 4001),))


class RefusesOnceThenHangs:
    """Introductions to a peer that refuses the first call, and whose next ones take forever."""

    def __init__(self) -> None:
        self.calls = 0
        self.hangs = asyncio.Event()

    async def introduce(self, contact: Contact, *, timeout_s: float) -> Any:
        self.calls += 1
        if self.calls == 1:
            raise NetworkError("connection refused")
        self.hangs.set()
        await asyncio.Event().wait()


async def _join(contacts: Sequence[Contact]) -> None:
    """Join no DHT."""


def test_a_round_in_progress_does_not_hide_why_the_one_before_failed() -> None:
    async def main() -> None:
        peer = RefusesOnceThenHangs()
        book = PeerBook(SeededIdentity(2).peer_id, lambda: 0.0)
        joining = Joining([ENTRY], peer, book, _join)  # type: ignore[arg-type]
        task = asyncio.get_running_loop().create_task(joining.run())
        await peer.hangs.wait()
        assert joining.failures == {ENTRY.peer_id: "connection refused"}
        assert joining.is_refused
        task.cancel()
        await asyncio.wait([task])

    run_virtual(main())
