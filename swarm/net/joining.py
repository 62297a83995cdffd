"""Join the swarm, and rejoin it when needed, in the background until the node closes.

Every bootstrap address is tried at once; when none answers, peers remembered in the book are tried. A failed
attempt is repeated with a back-off. A joined node repeats this occasionally, to find bootstrap peers
that have returned, and to merge two halves of a swarm after a network partition.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from swarm.core.backoff import Backoff
from swarm.core.errors import DeadlineExceeded, NotInvited, SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.core.presets import WAN, Timings
from swarm.net.hello import Introductions
from swarm.net.peerbook import PeerBook

_logger = logging.getLogger(__name__)


# Remembered peers that are tried when no bootstrap peer answers. All are tried at once, so more would cause a
# burst.
REMEMBERED_MAX = 20


class Joining:
    """The background task that joins the swarm.

    `join(contacts)` is called once with every peer, and again when a peer answers that did not answer before.
    `attempted` is set after the first round, `joined` once a peer has answered.
    """

    def __init__(
        self,
        bootstrap: Sequence[Contact],
        introductions: Introductions,
        book: PeerBook,
        join: Callable[[Sequence[Contact]], Coroutine[Any, Any, None]],
        timings: Timings = WAN,
    ) -> None:
        self._bootstrap = _by_peer(bootstrap)
        self._introductions = introductions
        self._book = book
        self._join = join
        self._timings = timings
        self._tried: set[PeerId] = set()
        self._lost: set[PeerId] = set()
        # reason why each peer did not answer when it was last asked; kept during a round
        self.failures: dict[PeerId, str] = {}
        self._silent: set[PeerId] = set()  # peers of this round whose answer timed out
        # in the last completed round all peers refused or failed at once, and none timed out
        self.is_refused = False
        self.not_invited = ""  # the last refusal by a peer of an invited run
        self.attempted = asyncio.Event()
        self.joined = asyncio.Event()

    async def run(self) -> None:
        """Join, and keep trying, until cancelled."""
        backoff = Backoff(self._timings.rejoin_first_s, self._timings.rejoin_s_max, random)
        while True:
            asked, answered = await self._round()
            self.is_refused = asked > 0 and not answered and not self._silent
            self.attempted.set()
            if answered:
                backoff.reset()
            if answered or not asked:
                await asyncio.sleep(self._timings.reintroduce_s * random.uniform(0.8, 1.2))
                continue
            if not backoff.failures:
                _logger.warning(
                    "no peer has answered yet; this node keeps trying: %s", "; ".join(self.failures.values())
                )
            await asyncio.sleep(backoff.next_s())

    async def _round(self) -> tuple[int, int]:
        """Return how many peers were asked in one round, and how many answered."""
        self._silent = set()
        asked, answered = list(self._bootstrap), await self._ask(self._bootstrap)
        if not answered:
            given = {contact.peer_id for contact in self._bootstrap}
            remembered = [
                peer.contact
                for peer in self._book.known()
                if peer.contact.addresses and peer.peer_id not in given
            ]
            remembered = remembered[:REMEMBERED_MAX]
            asked, answered = asked + remembered, await self._ask(remembered)
        peers = {contact.peer_id for contact in asked}
        self.failures = {peer: reason for peer, reason in self.failures.items() if peer in peers}
        return len(asked), answered

    async def _ask(self, contacts: Sequence[Contact]) -> int:
        """Ask all of them at once, and join through each that answers without waiting for the others. Returns
        how many answered.
        """
        answered = 0
        async with asyncio.TaskGroup() as group:
            waiting = {group.create_task(self._hello(contact)) for contact in contacts}
            unknown = [contact for contact in contacts if contact.peer_id not in self._tried]
            self._tried |= {contact.peer_id for contact in unknown}
            if unknown:
                # Set at once, because DHT operations wait for it.
                group.create_task(self._join(unknown))
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                live = [contact for task in done if (contact := task.result()) is not None]
                answered += len(live)
                recovered = [contact for contact in live if contact.peer_id in self._lost]
                self._lost -= {contact.peer_id for contact in recovered}
                if recovered:
                    group.create_task(self._join(recovered))
                if live:
                    self.joined.set()
                    self.attempted.set()
        return answered

    async def _hello(self, contact: Contact) -> Contact | None:
        try:
            hello = await self._introductions.introduce(contact, timeout_s=self._timings.hello_timeout_s)
        except SwarmError as error:
            self.failures[contact.peer_id] = str(error)
            if isinstance(error, DeadlineExceeded):
                self._silent.add(contact.peer_id)
            if isinstance(error, NotInvited):
                self.not_invited = str(error)
            self._lost.add(contact.peer_id)
            return None
        self.failures.pop(contact.peer_id, None)
        return hello.contact


def _by_peer(contacts: Sequence[Contact]) -> list[Contact]:
    """Return one contact per peer, with all the addresses that were given for it."""
    merged: dict[PeerId, Contact] = {}
    for contact in contacts:
        before = merged[contact.peer_id].addresses if contact.peer_id in merged else ()
        merged[contact.peer_id] = Contact(
            contact.peer_id, tuple(dict.fromkeys((*before, *contact.addresses)))
        )
    return list(merged.values())
