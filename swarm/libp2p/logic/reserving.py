"""Choose the relays at which a peer that nobody can call keeps reservations. Pure; times are seconds, passed
in.

The peer holds two reservations, in different networks if possible. It renews each at half its lifetime, and
asks another relay as soon as one is lost. A relay that has failed is asked again after a pause that doubles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.core.backoff import backoff_s
from swarm.core.ids import Contact, PeerId
from swarm.net.scope import network_of

WANTED = 2  # more would load relays; with one, the peer could not be called while it is replaced
RELAYS_MAX = 32  # known relays
LIFE_S_MIN, LIFE_S_MAX = 60.0, 7200.0  # bounds of the lifetime that a relay's answer may claim
_PAUSE_FIRST_S, _PAUSE_MAX_S = 1.0, 300.0


@dataclass(slots=True)
class _Known:
    contact: Contact
    round_trip_s: float = math.inf
    failures: int = 0
    not_before_s: float = -math.inf
    asking: bool = False
    until_s: float = -math.inf  # expiration of the reservation
    renew_s: float = math.inf

    @property
    def network(self) -> str:
        return network_of(self.contact.addresses[0].host) if self.contact.addresses else ""


class Reservations:
    """The known relays, and the reservations at them."""

    def __init__(self) -> None:
        self._relays: dict[PeerId, _Known] = {}

    def offer(
        self, relays: Iterable[Contact], round_trip_s: Callable[[PeerId], float] = lambda peer_id: math.inf
    ) -> None:
        """Learn of relays. Above 32, unused relays with the most failures are forgotten. `round_trip_s`
        returns what is known about their latency before they are asked.
        """
        for contact in relays:
            known = self._relays.get(contact.peer_id)
            if known is None:
                self._relays[contact.peer_id] = _Known(contact, round_trip_s(contact.peer_id))
            else:
                known.contact = contact
        for peer_id in sorted(self._relays, key=lambda one: self._relays[one].failures, reverse=True):
            known = self._relays[peer_id]
            if len(self._relays) <= RELAYS_MAX:
                break
            if not known.asking and known.until_s == -math.inf:
                del self._relays[peer_id]

    def held(self, now_s: float) -> list[Contact]:
        """Return the relays through which this peer can be called."""
        return [one.contact for one in self._relays.values() if one.until_s > now_s]

    def due(self, now_s: float) -> list[Contact]:
        """Return the relays to ask now. Each counts as being asked until `granted` or `failed` is called."""
        known = list(self._relays.values())
        for one in known:
            if one.until_s <= now_s:
                one.until_s, one.renew_s = -math.inf, math.inf
        chosen = [one for one in known if one.renew_s <= now_s and not one.asking]
        in_use = [one for one in known if one.until_s > now_s or one.asking]
        free = [one for one in known if one not in in_use and one.not_before_s <= now_s]
        while free and len(in_use) < WANTED:
            networks = {one.network for one in in_use}
            best = min(free, key=lambda one: (one.network in networks, one.failures, one.round_trip_s))
            free.remove(best)
            in_use.append(best)
            chosen.append(best)
        for one in chosen:
            one.asking = True
        return [one.contact for one in chosen]

    def next_s(self, now_s: float) -> float:
        """Return the time at which `due` will next return relays if nothing else happens; infinity: never."""
        times = [math.inf]
        for one in self._relays.values():
            if not one.asking:
                times += [one.until_s, one.renew_s] if one.until_s > now_s else [one.not_before_s]
        return min(time_s for time_s in times if time_s > now_s)

    def granted(self, relay: PeerId, life_s: float, round_trip_s: float | None, now_s: float) -> None:
        """Record that a relay has granted or renewed a reservation for `life_s` seconds."""
        known = self._relays.get(relay)
        if known is None:
            return
        life_s = min(max(life_s, LIFE_S_MIN), LIFE_S_MAX)
        known.asking, known.failures = False, 0
        known.until_s, known.renew_s = now_s + life_s, now_s + life_s / 2
        if round_trip_s is not None:
            known.round_trip_s = round_trip_s

    def failed(self, relay: PeerId, now_s: float) -> None:
        """Record that a relay refused or did not answer, or that the connection to it has ended."""
        known = self._relays.get(relay)
        if known is None:
            return
        known.asking = False
        known.failures += 1
        known.not_before_s = now_s + backoff_s(known.failures, _PAUSE_FIRST_S, _PAUSE_MAX_S)
        known.until_s, known.renew_s = -math.inf, math.inf
