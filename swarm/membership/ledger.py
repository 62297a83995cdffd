"""The ledger of one run on one peer: the record of the other peers' conduct, from which follows which of them
are passed over. Pure.

Peers exchange only proofs of lies. All other faults (a member stalls, abandons a round that the others
commit, or holds averages that differ from theirs) may be due to a link, or to this peer itself. They stay in
this peer's own ledger: the member is passed over for groups for 1 round, after further faults for 4, 16 and
at most 64 rounds. An elector that is passed over votes as before.

Identities cost nothing, so newcomers without a certified round also share one account: an attacker that uses
a new identity for each fault is stopped after a few rounds. Proven peers that are not electors and have a
fault that is not forgiven yet share another account: an attacker with a hundred such identities, of which one
is at fault in each round, is stopped once each has been at fault.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from swarm.core.backoff import backoff_s
from swarm.core.errors import PeerError, UsageError
from swarm.core.ids import PeerId

ENTRIES_MAX: Final = 4096
PASSED_OVER_ROUNDS_MAX: Final = 64
_GROWTH: Final = 4.0
_STEPS_MAX: Final = 4  # 1, 4, 16, 64
# certified rounds that forgive one step. Too small: a member that stalls in every third round costs more than
# it contributes; too large: a peer whose link was bad for an hour is passed over for days
_FORGIVEN_ROUNDS: Final = 16
_FORMAT: Final = 1
_COUNT_MAX: Final = 1 << 53


@dataclass(slots=True)
class Account:
    """Faults that are not forgiven yet, and the end of the pause that follows from them. The ledger numbers
    the rounds.
    """

    steps: int = 0
    certified_since: int = 0  # rounds since the last fault or the last forgiven step
    until: int = 0  # the number of the first round for which it is not passed over

    def fault(self, now: int) -> None:
        """Count a fault in round number `now`. Several faults during one pause count as one."""
        self.certified_since = 0
        if now >= self.until:
            self.steps = min(self.steps + 1, _STEPS_MAX)
            self.until = now + 1 + int(backoff_s(self.steps, 1, PASSED_OVER_ROUNDS_MAX, _GROWTH))

    def success(self) -> None:
        """Count a certified round."""
        self.certified_since += 1
        if self.certified_since >= _FORGIVEN_ROUNDS:
            self.steps, self.certified_since = max(self.steps - 1, 0), 0


@dataclass(slots=True)
class LedgerEntry:
    """The record of one other peer."""

    rounds: int = 0  # certified rounds to which it contributed
    samples: float = 0.0  # its samples in those rounds, in groups of this peer
    faults: int = 0
    last_seen_s: float = 0.0  # Unix time
    held: bool = False  # the last fault was that it led a group of this peer and did not begin the round
    account: Account = field(default_factory=Account)

    @property
    def is_member(self) -> bool:
        """Return whether the peer has contributed to a certified round."""
        return self.rounds > 0


class MemberLedger:
    """The ledger of one run. At most `entries_max` peers are remembered: those with certified rounds displace
    others, and among equals the one that was seen longest ago is forgotten.
    """

    def __init__(self, own: PeerId, entries_max: int = ENTRIES_MAX) -> None:
        self._own, self._entries_max = own, entries_max
        self._entries: dict[PeerId, LedgerEntry] = {}
        self._strangers = Account()
        # shared by all proven peers with a fault; counts further faults of other such peers
        self._repeating = Account()
        self._repeated_last: PeerId | None = None
        self.rounds = 0  # certified rounds that this peer knows of: the unit of all pauses
        self.changed = False  # since the last `encode`

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, peer: PeerId) -> LedgerEntry | None:
        """Return what is remembered about a peer."""
        return self._entries.get(peer)

    def is_proven(self, peer: PeerId) -> bool:
        """Return whether a peer has contributed to a certified round of this run."""
        entry = self._entries.get(peer)
        return entry is not None and entry.is_member

    # ---- events

    def certified(self, contributors: Iterable[PeerId], now_s: float) -> None:
        """Record a certificate of the run, and the peers that are known to have contributed to it. `now_s`:
        Unix time.
        """
        self.rounds += 1
        self.contributed(dict.fromkeys(contributors, 0.0), now_s)

    def contributed(self, samples: Mapping[PeerId, float], now_s: float) -> None:
        """Record that these peers contributed to a certified round, each with a number of samples."""
        if any(self.is_doubted(peer) for peer in samples):
            self._repeating.success()  # once for all contributors: one of them may be at fault in each round
        for peer, count in samples.items():
            entry = self._find_or_add(peer, now_s, member=True)
            if entry is None:
                continue
            if not entry.is_member:
                self._strangers.success()
            entry.rounds = min(entry.rounds + 1, _COUNT_MAX)
            entry.samples = min(entry.samples + count, float(_COUNT_MAX))
            entry.account.success()

    def fault(self, peer: PeerId, now_s: float, *, held: bool = False) -> None:
        """Record that a member of a group was at fault in its round. `held`: as a leader that did not begin
        the round.
        """
        if peer == self._own:
            return
        entry = self._entries.get(peer)
        if entry is None or not entry.is_member:
            self._strangers.fault(self.rounds)
        # a single peer that repeats faults is covered by its own account
        elif entry.account.steps and self.rounds >= entry.account.until and peer != self._repeated_last:
            self._repeating.fault(self.rounds)
            self._repeated_last = peer
        if (entry := self._find_or_add(peer, now_s)) is not None:
            entry.faults, entry.held = min(entry.faults + 1, _COUNT_MAX), held
            entry.account.fault(self.rounds)

    # ---- queries

    def is_passed_over(self, peer: PeerId, *, electors: Collection[PeerId] = ()) -> bool:
        """Return whether this peer currently avoids groups with another one, if it has an alternative
        (`averaging.matchmaking.logic.precedence.is_passed_over`). For `electors` only their own faults count.
        """
        entry = self._entries.get(peer)
        if entry is not None and self.rounds < entry.account.until:
            return True
        if self.rounds < self._repeating.until and peer not in electors and self.is_doubted(peer):
            return True
        return self.rounds < self._strangers.until and not (entry is not None and entry.is_member)

    def is_doubted(self, peer: PeerId) -> bool:
        """Return whether a peer has faults that are not forgiven yet. Such a peer may be allowed in groups
        again already.
        """
        entry = self._entries.get(peer)
        return entry is not None and entry.account.steps > 0

    def is_holding(self, peer: PeerId) -> bool:
        """Return whether a peer is passed over because it led a group and did not begin."""
        entry = self._entries.get(peer)
        return entry is not None and entry.held and self.is_passed_over(peer, electors=(peer,))

    # ---- on disk

    def encode(self) -> dict[str, Any]:
        """Return the ledger as a document for JSON. Pauses are not stored: after a restart, this peer tries
        every other peer once.
        """
        self.changed = False
        return {
            "format": _FORMAT,
            "rounds": self.rounds,
            "peers": [
                [
                    peer.public_key.hex(),
                    one.rounds,
                    one.samples,
                    one.faults,
                    one.last_seen_s,
                    one.account.steps,
                ]
                for peer, one in self._entries.items()
            ],
        }

    def load(self, document: Any) -> None:
        """Restore the result of `encode`. Raises PeerError and changes nothing if `document` is not valid."""
        entries: dict[PeerId, LedgerEntry] = {}
        try:
            if document["format"] != _FORMAT:
                raise ValueError("of another version")
            rounds = _count(document["rounds"])
            for name, own_rounds, samples, faults, seen_s, steps in document["peers"][: self._entries_max]:
                peer = PeerId(bytes.fromhex(name))
                if not (0.0 <= samples <= _COUNT_MAX and 0.0 <= seen_s <= _COUNT_MAX):
                    raise ValueError("numbers out of bounds")
                account = Account(steps=min(_count(steps), _STEPS_MAX))
                entries[peer] = LedgerEntry(
                    _count(own_rounds), float(samples), _count(faults), float(seen_s), account=account
                )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, UsageError) as error:
            raise PeerError(f"this is not a ledger: {error or type(error).__name__}") from None
        self._entries, self.rounds = entries, rounds

    def _find_or_add(self, peer: PeerId, now_s: float, *, member: bool = False) -> LedgerEntry | None:
        """Return a peer's entry, a new one if there is room for it."""
        entry = self._entries.get(peer)
        if entry is None:
            if len(self._entries) >= self._entries_max:
                last = min(self._entries, key=self._worth)
                if self._entries[last].is_member and not member:
                    return None
                del self._entries[last]
            entry = self._entries[peer] = LedgerEntry()
        entry.last_seen_s = max(entry.last_seen_s, now_s)
        self.changed = True
        return entry

    def _worth(self, peer: PeerId) -> tuple[bool, float, PeerId]:
        entry = self._entries[peer]
        return entry.is_member, entry.last_seen_s, peer


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _COUNT_MAX:
        raise ValueError("numbers out of bounds")
    return value
