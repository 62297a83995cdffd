"""Reports of this peer to the others, directly: to members at once, to strangers afterwards.

The addresses of a peer are its own claim. A crowd of identities that name addresses where nobody answers
would otherwise delay what members tell one another by the time limit of a call, and cost them a call for each
identity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from swarm.core.ids import PeerId
from swarm.core.notify import ChangeEvent

_CONCURRENT_MAX = 16
STRANGERS_MAX = 32  # that wait for a report; those that wait longest are left to read the DHT
# Between two batches of reports to strangers. Larger: newcomers to a run with short epochs learn later that
# one is full.
STRANGERS_PAUSE_S = 0.5


class ReportSender:
    """Sends reports to other peers. It belongs to the network thread."""

    def __init__(self, report: Callable[[PeerId, bool, bool], Awaitable[None]]) -> None:
        """`report(peer, full, goodbye)` sends one report; it raises nothing when the peer does not answer."""
        self._report = report
        self._strangers: dict[PeerId, None] = {}  # that get the next reports
        self._full = False  # those reports say that the epoch is full
        self._wake = ChangeEvent()

    async def send(self, peers: Iterable[PeerId], *, full: bool = False, goodbye: bool = False) -> None:
        """Report to all of these, and wait until each has answered or failed to."""
        limit = asyncio.Semaphore(_CONCURRENT_MAX)

        async def report(peer: PeerId) -> None:
            async with limit:
                await self._report(peer, full, goodbye)

        async with asyncio.TaskGroup() as group:
            for peer in peers:
                group.create_task(report(peer))

    def send_to_strangers(self, peers: Iterable[PeerId], *, full: bool = False) -> None:
        """Report to these as soon as the strangers before them have their reports."""
        for peer in peers:
            self._strangers[peer] = None
            self._wake.notify()
        self._full |= full
        while len(self._strangers) > STRANGERS_MAX:
            del self._strangers[next(iter(self._strangers))]

    async def run(self) -> None:
        """Report to strangers, until cancelled."""
        while True:
            await self._wake.wait()
            strangers, self._strangers = self._strangers, {}
            full, self._full = self._full, False
            await self.send(strangers, full=full)
            await asyncio.sleep(STRANGERS_PAUSE_S)
