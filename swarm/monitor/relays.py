"""Watch the relays that a monitor knows, by sending a Hello to a few at a time. Runs on the network loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from swarm.core.clock import Clock
from swarm.core.errors import SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.monitor.logic.view import RelayReport
from swarm.net.hello import Introduction
from swarm.net.logic.relay_counts import RelayCounts

_INTERVAL_S = 10.0  # interval of queries
_OTHERS_MAX = 4  # peers of unknown role that are asked at a time
_RELAYS_MAX = 16
_FORGOTTEN_S = 60.0  # time after its last answer at which a relay is forgotten
_TIMEOUT_S = 5.0


class Greeter(Protocol):
    """The part of `Introductions` that this module uses."""

    async def introduce(self, contact: Contact, *, timeout_s: float) -> Introduction: ...


class RelayWatch:
    """The relays among the peers that a monitor knows."""

    def __init__(self, greeter: Greeter, clock: Clock) -> None:
        self._greeter, self._clock = greeter, clock
        self._asked_s = float("-inf")
        self._place = 0  # position in the list of the other peers
        self._relays: dict[PeerId, tuple[Contact, RelayCounts, float]] = {}

    async def ask(self, entry: Iterable[Contact], others: Iterable[Contact]) -> None:
        """If due, query the relays, the entry peers, and a few others in turn."""
        now_s = self._clock.monotonic_s()
        if now_s - self._asked_s < _INTERVAL_S:
            return
        self._asked_s = now_s
        for peer_id in [one for one, (_, _, at_s) in self._relays.items() if now_s - at_s > _FORGOTTEN_S]:
            del self._relays[peer_id]
        asked = {contact.peer_id: contact for contact, _, _ in self._relays.values()}
        asked |= {contact.peer_id: contact for contact in entry}
        rest = [one for one in others if one.peer_id not in asked and one.addresses]
        chosen = [rest[(self._place + number) % len(rest)] for number in range(min(_OTHERS_MAX, len(rest)))]
        self._place += len(chosen)
        async with asyncio.TaskGroup() as group:
            for contact in [*asked.values(), *chosen]:
                group.create_task(self._ask(contact))

    def views(self) -> tuple[RelayReport, ...]:
        """Return the relays that have answered recently, the one with the most carried bytes first."""
        now_s = self._clock.monotonic_s()
        found = [
            RelayReport(
                peer_id=str(peer_id),
                short=peer_id.short,
                age_s=max(now_s - at_s, 0.0),
                reservations=counts.reservations,
                circuits=counts.circuits,
                carried_bytes=counts.carried_bytes,
                refused=counts.refused,
            )
            for peer_id, (_, counts, at_s) in self._relays.items()
        ]
        return tuple(sorted(found, key=lambda one: (-one.carried_bytes, one.peer_id)))

    async def _ask(self, contact: Contact) -> None:
        try:
            answer = await self._greeter.introduce(contact, timeout_s=_TIMEOUT_S)
        except SwarmError:
            return  # the relay is shown with its age until it is forgotten
        peer_id = contact.peer_id
        if not answer.relay_port or answer.relayed is None:
            self._relays.pop(peer_id, None)
        elif peer_id in self._relays or len(self._relays) < _RELAYS_MAX:
            self._relays[peer_id] = contact, answer.relayed, self._clock.monotonic_s()
