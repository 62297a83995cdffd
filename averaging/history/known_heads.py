"""The heads that other peers report, and which of these peers cannot be reached. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from swarm.core.ids import Contact, PeerId

_DISMISSED_MAX = 1024  # beyond this the head that was dismissed first is compared again
_PEERS_MAX = 256  # beyond this the stranger that was silent for the longest time is forgotten, then a member
_ASKED_MAX = 3  # peers that are asked for the history of one head, one after the other
# No question is repeated sooner, as long as this peer's own head is the same. A peer that waits compares
# histories whenever it reads reports; larger: it learns later that another one has moved on
ASK_AGAIN_S = 1.0
# A peer that answers no call for this long has no voice any more; its records have expired by then. Too
# large: failed peers keep a newcomer from following live ones; too small: an attacker that silences peers
# decides for it
SILENT_S = 15.0
# Heads that only strangers report: their holders are asked for this many at once, and one that does not
# answer keeps its place for the pause, so that a crowd costs at most two failed calls a second. More, or
# shorter: a crowd costs more handshakes; fewer, or longer: histories of newcomers are compared later
STRANGE_HEADS_MAX = 4
STRANGE_PAUSE_S = 2.0


class KnownHeads:
    """Reports of other peers, the latest of each."""

    def __init__(self) -> None:
        self._heads: OrderedDict[PeerId, tuple[bytes, Contact]] = OrderedDict()
        self._heard_s: dict[PeerId, float] = {}  # when each peer's report, or its record, was read last
        self._dismissed: OrderedDict[bytes, None] = OrderedDict()
        self._refused: set[PeerId] = set()  # peers whose hosts refused the last connection
        self._silent_s: dict[PeerId, float] = {}  # silent peers -> start of the silence
        # when each head was asked for, of anybody or (one that is needed) of this peer; and with which head
        self._asked_s: dict[tuple[bytes, PeerId | None], float] = {}
        self._asked_with = b""

    def heard(
        self,
        contact: Contact,
        head: bytes,
        now_s: float,
        counts: Callable[[PeerId], bool] = lambda peer: True,
    ) -> None:
        """Record what a peer reports. `now_s`: a monotonic clock's time. `counts`: whether a peer is no
        stranger; any number of strangers displace no other peer.
        """
        # the record of a failed peer is read repeatedly, so only changes show that a peer is alive
        if self._heads.get(contact.peer_id, (b"",))[0] != head:
            self.answered(contact.peer_id)
        self._heads[contact.peer_id], self._heard_s[contact.peer_id] = (head, contact), now_s
        self._heads.move_to_end(contact.peer_id)
        if len(self._heads) > _PEERS_MAX:
            self.forget(next((one for one in self._heads if not counts(one)), next(iter(self._heads))))

    def answered(self, peer: PeerId) -> None:
        """Record that a peer answered a call."""
        self._refused.discard(peer)
        self._silent_s.pop(peer, None)

    def missed(self, peer: PeerId, now_s: float, *, refused: bool) -> None:
        """Record that a peer did not answer a call: it is silent since it was heard last. `refused`: its host
        refused the connection; `now_s`: a monotonic clock's time.
        """
        if peer not in self._heads:
            return
        self._silent_s.setdefault(peer, min(self._heard_s[peer], now_s))
        if refused:
            self._refused.add(peer)

    def is_gone(self, peer: PeerId) -> bool:
        """Return whether the peer has ended, as far as this process can know: its host refuses connections.
        One that this process has not heard of since it began may be cut off.
        """
        return peer in self._refused

    def forget(self, peer: PeerId) -> None:
        """Forget what a peer reported."""
        for known in (self._heads, self._heard_s, self._silent_s):
            known.pop(peer, None)
        self._refused.discard(peer)

    def contacts(self, peers: Iterable[PeerId]) -> list[Contact]:
        """Return the contacts of those of the peers that are known."""
        return [self._heads[peer][1] for peer in peers if peer in self._heads]

    def elsewhere(self, knows: Callable[[bytes], bool], left: Callable[[bytes], bool]) -> set[PeerId]:
        """Return the peers that report a head of another history: one that was dismissed, or is of the one
        that this peer has left. `knows`: whether a head is in the one that it follows.
        """
        return {
            peer
            for peer, (head, _) in self._heads.items()
            if not knows(head) and (left(head) or head in self._dismissed)
        }

    def dismiss(self, head: bytes) -> None:
        """Record that the history of this head was compared, and is not followed."""
        self._dismissed[head] = None
        if len(self._dismissed) > _DISMISSED_MAX:
            self._dismissed.popitem(last=False)

    def is_dismissed(self, head: bytes) -> bool:
        """Return whether this head was dismissed."""
        return head in self._dismissed

    def reconsider(self) -> None:
        """Compare all heads again: this peer's own history has changed."""
        self._dismissed.clear()

    def to_ask(
        self,
        needed: Collection[PeerId],
        is_open: Callable[[bytes], bool],
        counts: Callable[[PeerId], bool],
        own_head: bytes,
        now_s: float,
    ) -> tuple[list[list[Contact]], list[list[Contact]]]:
        """Return the peers to be asked for their histories: each one that is `needed`, alone, and for each
        head that is open the last few that reported it, the latest first: a dead one does not answer. Peers
        that have missed a call come last, so that in time each dead one is asked and its report no longer
        counts. The caller asks the returned peers now: they are not returned again for the same heads within
        `ASK_AGAIN_S`, unless `own_head` has changed. Then the same of heads that only peers report that do
        not count (`counts`): there may be any number of them, and none of these heads need exist.
        `now_s`: a monotonic clock's time.
        """
        if own_head != self._asked_with:
            self._asked_with, self._asked_s = own_head, {}
        asked = {one: asked_s for one, asked_s in self._asked_s.items() if now_s - asked_s < ASK_AGAIN_S}
        alone: dict[tuple[bytes, PeerId | None], list[Contact]] = {}
        holders: tuple[dict[bytes, list[Contact]], ...] = {}, {}
        latest = reversed(self._heads.items())
        for peer, (head, contact) in sorted(latest, key=lambda known: known[0] in self._silent_s):
            if not contact.is_callable:
                continue
            if peer in needed:
                if (head, peer) not in asked:
                    alone[head, peer] = [contact]
            elif is_open(head):
                found = holders[not counts(peer)].setdefault(head, [])
                found.extend([contact][: _ASKED_MAX - len(found)])
        known, strange = holders
        strange = {head: found for head, found in strange.items() if head not in known}
        known = {head: found for head, found in known.items() if (head, None) not in asked}
        self._asked_s = asked | dict.fromkeys([*alone, *((head, None) for head in known)], now_s)
        return [*alone.values(), *known.values()], [*strange.values()]

    def reported(self, now_s: float) -> dict[PeerId, bytes]:
        """Return the head that each peer reports, without those whose hosts refuse connections and those that
        have been silent for `SILENT_S`.
        """
        return {
            peer: head
            for peer, (head, _) in self._heads.items()
            if peer not in self._refused and now_s - self._silent_s.get(peer, now_s) < SILENT_S
        }
