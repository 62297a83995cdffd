"""The records that this process has issued, and those that another one has issued in the same peer's name.

An identity file that was copied to a second machine makes two processes one peer: each replaces the other's
records, and calls reach either of them. A record shows it: its signature is this peer's, and it was issued
while this process was running, but not by it.
"""

from __future__ import annotations

from collections import OrderedDict

from swarm.core.ids import Key, PeerId
from swarm.dht.logic.records import Record

Name = tuple[Key, str | None]  # of an entry of this peer: key and subkey

_TIMES_MAX = 16  # issue times remembered of an entry; older records of it show nothing
_ISSUED_MAX = 4096  # remembered, beyond this those written longest ago are forgotten
_FOREIGN_MAX = 256
# The other process writes several times in this time; after it the problem counts as solved.
_FOREIGN_AGE_US = 300_000_000


class IssuedRecords:
    """The entries of one peer, by who issued them. Times are microseconds of the swarm's time."""

    def __init__(self, own: PeerId, started_us: int) -> None:
        """Begin at `started_us`: records of this peer from before are those of an earlier process."""
        self._own, self._started_us = own, started_us
        # by entry, the latest expiration, and the last issue times
        self._issued: OrderedDict[Name, tuple[int, tuple[int, ...]]] = OrderedDict()
        self._has_forgotten = False
        # of entries that this process did not issue: when it first saw one, or its time of issue if later
        self._foreign: OrderedDict[Name, int] = OrderedDict()
        self._foreign_us: int | None = None  # when it last knew that another process is alive

    def latest(self, key: Key, subkey: str | None) -> tuple[int, int]:
        """Return the latest expiration and issue time of an entry of this process; zeros if it has none."""
        expiration_us, times_us = self._issued.get((key, subkey), (0, (0,)))
        return expiration_us, times_us[-1]

    def previous_us(self, record: Record) -> int:
        """Return when this process issued the entry of one of its records last before that record; its own
        start if it did not. A later one that a replica holds may be of another process.
        """
        _, times_us = self._issued.get((record.key, record.subkey), (0, ()))
        return max(self._started_us, *(one for one in times_us if one < record.issued_at_us), 0)

    def add(self, record: Record) -> None:
        """Take in a record that this process has issued."""
        name = record.key, record.subkey
        expiration_us, times_us = self._issued.get(name, (0, ()))
        times_us = (*times_us, record.issued_at_us)[-_TIMES_MAX:]
        self._issued[name] = max(record.expiration_us, expiration_us), times_us
        self._issued.move_to_end(name)
        if len(self._issued) > _ISSUED_MAX:
            self._issued.popitem(last=False)
            self._has_forgotten = True

    def on_received(self, record: Record, now_us: int) -> bool:
        """Take in a valid record that another peer has sent. Return whether it shows for the first time that
        another process is alive under this peer's identity.

        One record may have been late, or be of an earlier process on a machine with another clock. Two of one
        entry, the second issued after the first was seen, are not.
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
