"""The members of grid cells, as known to a host: a peer that every member of the cell chooses and reports to
(`averaging.matchmaking.service.cells`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarm.core.ids import Contact, PeerId

PEERS_MAX = 4096  # remembered; the entry that was not renewed for the longest time is dropped first
CELL_MEMBERS_MAX = 64  # members in one reply; the latest first
# Hosts of a cell that must say that a round is over. Smaller: one liar, or the only host that answers, makes
# peers leave out rounds; larger: a peer without partners searches on until it knows the epoch's certificate
_WORDS_MIN = 2


@dataclass(frozen=True, slots=True)
class _Entry:
    contact: Contact
    place: str
    turn: int
    until_s: float


class CellMembers:
    """Table of which peer is in which place. Each peer is in one place, the one it reported last."""

    def __init__(self, lifetime_s: float) -> None:
        self._lifetime_s = lifetime_s
        self._entries: OrderedDict[PeerId, _Entry] = OrderedDict()
        self._places: dict[str, OrderedDict[PeerId, None]] = {}

    def enter(self, contact: Contact, place: str, turn: int, now_s: float) -> None:
        """Record that the peer is at `place`, or will be after its round. A report with an older turn than
        the last one is ignored.
        """
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
        """Remove the peer from `place`, unless a newer report put it there again."""
        entry = self._entries.get(peer_id)
        if entry is not None and entry.place == place and entry.turn <= turn:
            self._drop(peer_id)

    def members_at(self, place: str, asker: PeerId, now_s: float) -> list[Contact]:
        """Return the contacts of the other peers at `place`, latest first, at most `CELL_MEMBERS_MAX`.
        Expired entries are removed.
        """
        found: list[Contact] = []
        for peer_id in list(reversed(self._places.get(place, ()))):
            entry = self._entries[peer_id]
            if entry.until_s <= now_s:
                self._drop(peer_id)
            elif peer_id != asker:
                found.append(entry.contact)
            if len(found) >= CELL_MEMBERS_MAX:
                break
        return found

    def __len__(self) -> int:
        return len(self._entries)

    def _drop(self, peer_id: PeerId) -> None:
        entry = self._entries.pop(peer_id, None)
        if entry is None:
            return
        members = self._places[entry.place]
        del members[peer_id]
        if not members:
            del self._places[entry.place]


def is_over_by_word(said: Mapping[PeerId, bool], has_standing: Callable[[PeerId], bool]) -> bool:
    """Return whether a round is over by the word of the hosts of its cell. `said`: by host that has replied,
    whether it says so. At least two hosts must say so, and more than half of those with standing; where none
    of these has replied, more than half of all. Anybody can make identities that are hosts of a cell, so a
    stranger may be the second host, but strangers cannot outvote hosts with standing. If two with standing
    were needed, a peer that has met one other peer would search until its time limit.
    """
    votes = [over for host, over in said.items() if has_standing(host)] or [*said.values()]
    return sum(said.values()) >= _WORDS_MIN and 2 * sum(votes) > len(votes)
