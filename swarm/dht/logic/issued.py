"""The records that this process has issued, and those that another process has issued with its identity.

Two processes with copies of one identity file are one peer to all others: each replaces the other's records,
and calls reach either of them. A record reveals this when it has this peer's signature and was issued while
this process was running, but not by this process.
"""

from __future__ import annotations

from collections import OrderedDict

from swarm.core.ids import Key, PeerId
from swarm.dht.logic.records import Record

Name = tuple[Key, str | None]  # key and subkey of an entry of this peer

_TIMES_MAX = 16  # issue times remembered per entry; nothing follows from older records
_ISSUED_MAX = 4096  # entries remembered; those written longest ago are forgotten first
_FOREIGN_MAX = 256
# The other process writes several times in this time; after it the problem counts as solved.
_FOREIGN_AGE_US = 300_000_000


class IssuedRecords:
    """The entries of one peer, by who issued them. Times are microseconds of the swarm's time."""

    def __init__(self, own: PeerId, started_us: int) -> None:
        """Start at `started_us`: an earlier process issued the records of this peer from before."""
        self._own, self._started_us = own, started_us
        # entry -> (latest expiration, last issue times)
        self._issued: OrderedDict[Name, tuple[int, tuple[int, ...]]] = OrderedDict()
        self._has_forgotten = False
        # entry that this process did not issue -> when it was first seen, or its issue time if that is later
        self._foreign: OrderedDict[Name, int] = OrderedDict()
        self._foreign_us: int | None = None  # when it last knew that another process is alive

    def latest(self, key: Key, subkey: str | None) -> tuple[int, int]:
        """Return the latest expiration and issue time of an entry of this process; zeros if it has none."""
        expiration_us, times_us = self._issued.get((key, subkey), (0, (0,)))
        return expiration_us, times_us[-1]

    def previous_us(self, record: Record) -> int:
        """Return when this process last issued the same entry before `record`, or when it started. A replica
        that holds a later record may have it from another process.
        """
        _, times_us = self._issued.get((record.key, record.subkey), (0, ()))
        return max(self._started_us, *(one for one in times_us if one < record.issued_at_us), 0)

    def add(self, record: Record) -> None:
        """Remember a record that this process has issued."""
        name = record.key, record.subkey
        expiration_us, times_us = self._issued.get(name, (0, ()))
        times_us = (*times_us, record.issued_at_us)[-_TIMES_MAX:]
        self._issued[name] = max(record.expiration_us, expiration_us), times_us
        self._issued.move_to_end(name)
        if len(self._issued) > _ISSUED_MAX:
            self._issued.popitem(last=False)
            self._has_forgotten = True

    def on_received(self, record: Record, now_us: int) -> bool:
        """Examine a valid record that another peer has sent. Return whether it shows for the first time that
        another process is alive with this peer's identity.

        One such record may have been delayed, or come from an earlier process whose clock was wrong. Two
        records of one entry, the second issued after the first was seen, are proof.
        """
        if record.writer != self._own or record.is_blob:
            return False
        name, issued_us = (record.key, record.subkey), record.issued_at_us
        _, times_us = self._issued.get(name, (0, ()))
        is_own = issued_us in times_us or (not times_us and self._has_forgotten)
        is_older = len(times_us) == _TIMES_MAX and issued_us < times_us[0]  # perhaps one that was forgotten
        if issued_us <= self._started_us or is_own or is_older:
            return False
        seen_us = self._foreign.setdefault(name, max(now_us, record.issued_at_us))
        if len(self._foreign) > _FOREIGN_MAX:
            self._foreign.popitem(last=False)
        if record.issued_at_us <= seen_us:
            return False
        is_new = not self.problem(now_us)
        self._foreign_us = now_us
        return is_new

    def problem(self, now_us: int) -> str | None:
        """Return a sentence that says that another process has this peer's identity, and what to do; None
        when that is not known.
        """
        if self._foreign_us is None or now_us - self._foreign_us > _FOREIGN_AGE_US:
            return None
        return (
            f"another running process has the identity of this peer ({self._own}), perhaps from a copied "
            "identity file, so that only one of the two can take part in a round: give each of them an "
            "identity file of its own"
        )
