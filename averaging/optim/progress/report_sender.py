"""Direct reports of this peer to the others: to members at once, to strangers afterwards.

The addresses of a peer are its own claim. A crowd of identities that name addresses where nobody answers
would otherwise delay what members tell one another by the time limit of a call, and cost them a call for each
identity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from swarm.core.backoff import Backoff
from swarm.core.ids import PeerId
from swarm.core.notify import ChangeEvent

_CONCURRENT_MAX = 16
STRANGERS_MAX = 32  # strangers waiting for a report; above this, those that waited longest must read the DHT
# Strangers in the first batch, and in the first one after most of a batch did not answer; each further batch
# is twice as large, up to STRANGERS_MAX. Smaller: many honest newcomers are told later; larger: identities
# without a peer cost more failed handshakes.
_BATCH_MIN = 8
# Interval between batches of reports to strangers. Larger: newcomers to a run with short epochs learn later
# that an epoch is full.
STRANGERS_PAUSE_S = 0.5
# The same interval after batches without most answers. Each missing answer costs a failed TLS handshake, and
# identities are free. Larger: honest newcomers among them must read the DHT instead.
SILENT_PAUSE_S_MAX = 16.0


class ReportSender:
    """Sends reports to other peers. It belongs to the network thread."""

    def __init__(self, report: Callable[[PeerId, bool, bool], Awaitable[bool]]) -> None:
        """`report(peer, full, goodbye)` sends one report, and returns whether the peer answered."""
        self._report = report
        self._backoff = Backoff(2 * STRANGERS_PAUSE_S, SILENT_PAUSE_S_MAX)
        self._strangers: dict[PeerId, None] = {}  # strangers that get the next reports
        self._full = False  # those reports say that the epoch is full
        self._batch = _BATCH_MIN  # largest number of strangers in the next batch
        self._wake = ChangeEvent()

    async def send(self, peers: Iterable[PeerId], *, full: bool = False, goodbye: bool = False) -> int:
        """Report to all of these peers, and wait until each has answered or failed to answer. Return how many
        failed.
        """
        limit = asyncio.Semaphore(_CONCURRENT_MAX)

        async def report(peer: PeerId) -> bool:
            async with limit:
                return await self._report(peer, full, goodbye)

        async with asyncio.TaskGroup() as group:
            reports = [group.create_task(report(peer)) for peer in peers]
        return sum(not one.result() for one in reports)

    def send_to_strangers(self, peers: Iterable[PeerId], *, full: bool = False) -> None:
        """Report to these strangers after those that were queued before."""
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
            if not self._strangers:
                continue
            full, strangers = self._full, list(self._strangers)[: self._batch]
            for peer in strangers:
                del self._strangers[peer]
            if self._strangers:
                self._wake.notify()
            else:
                self._full = False
            failed = await self.send(strangers, full=full)
            if 2 * failed <= len(strangers):
                self._batch = min(2 * self._batch, STRANGERS_MAX)
                self._backoff.reset()
                await asyncio.sleep(STRANGERS_PAUSE_S)
            else:
                self._batch = _BATCH_MIN
                await asyncio.sleep(self._backoff.next_s())
                self._strangers.clear()  # they are as old as the pause; the next read of records has the rest
