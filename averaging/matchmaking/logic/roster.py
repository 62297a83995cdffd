"""Who is in which cell of the grid, as peers told the holder that all of them choose for their cell
(`averaging.matchmaking.service.cells`).

Pure; time is a parameter.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from swarm.core.ids import Contact, PeerId

PEERS_MAX = 4096  # remembered; the longest silent goes first
MATES_MAX = 64  # named in one answer; the latest first


@dataclass(frozen=True, slots=True)
class _Entry:
    contact: Contact
    place: str
    turn: int
    until_s: float


class Roster:
    """Each peer is in one place: where it said last that it is."""

    def __init__(self, lifetime_s: float) -> None:
        self._lifetime_s = lifetime_s
        self._entries: OrderedDict[PeerId, _Entry] = OrderedDict()
        self._places: dict[str, OrderedDict[PeerId, None]] = {}

    def enter(self, contact: Contact, place: str, turn: int, now_s: float) -> None:
        """It is there, or will be after its round. An older word than its last changes nothing."""
        peer_id = contact.peer_id
        before = self._entries.get(peer_id)
        if before is not None and before.turn > turn and before.until_s > now_s:
            return
        self._drop(peer_id)
        self._entries[peer_id] = _Entry(contact, place, turn, now_s + self._lifetime_s)
        self._places.setdefault(place, OrderedDict())[peer_id] = None
        while len(self._entries) > PEERS_MAX:
            self._drop(next(iter(self._entries)))

    def leave(self, peer_id: PeerId, place: str, turn: int) -> None:
        """It is no longer there, unless it came back meanwhile."""
        entry = self._entries.get(peer_id)
        if entry is not None and entry.place == place and entry.turn <= turn:
            self._drop(peer_id)

    def mates(self, place: str, asker: PeerId, now_s: float) -> list[Contact]:
        """Who else is there."""
        found: list[Contact] = []
        for peer_id in list(reversed(self._places.get(place, ()))):
            entry = self._entries[peer_id]
            if entry.until_s <= now_s:
                self._drop(peer_id)
            elif peer_id != asker:
                found.append(entry.contact)
            if len(found) >= MATES_MAX:
                break
        return found

    def __len__(self) -> int:
        return len(self._entries)

    def _drop(self, peer_id: PeerId) -> None:
        entry = self._entries.pop(peer_id, None)
        if entry is None:
            return
        there = self._places[entry.place]
        del there[peer_id]
        if not there:
            del self._places[entry.place]
