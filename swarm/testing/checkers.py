"""Invariants of a simulated swarm: small classes, each of which checks one promise.

A scenario keeps a `Ledger` of all writes and feeds the checkers while it runs: the results of reads, the
contents of every storage and the sizes of all tables. A broken promise becomes a line of `violations` with
the virtual time. The checkers know everything (the ledger, every peer's storage, the true time), which no
peer does.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.core.ids import Key, PeerId
from swarm.dht.logic.records import VERIFIED_MAX, Entry, decode_value
from swarm.dht.service.replica import RECEIVED_MAX
from swarm.testing.dht_swarm import SwarmMember
from swarm.testing.virtual_loop import EPOCH_UNIX_S

_VIOLATIONS_MAX = 50
_DEPTH_MAX = 7  # levels of objects in which collections are looked for
_PACKAGES = ("swarm.", "averaging.", "moe.")  # of this project
# caches that fill up in every long run, by the name of the attribute
_CACHES_MAX: Mapping[str, int] = {
    "_verified": VERIFIED_MAX,
    "_accepted": VERIFIED_MAX,
    "_received": RECEIVED_MAX,
}
_CLOCK_SLACK_S = 1.0  # clock error that a peer leaves uncorrected (0.5 s), and the time of a message


@dataclass(slots=True, kw_only=True)
class RecordedWrite:
    """One entry that a writer issued. Every value is written once, so that a value identifies its write.
    Times are the simulation's.
    """

    number: int
    key: Key
    subkey: str | None
    writer: PeerId
    begun_s: float
    expires_s: float
    acknowledged_s: float | None = None  # None: in progress, or no replica accepted it
    # when a later write or a deletion by the same owner began: from then on, either may be read
    replaced_s: float | None = None
    last_plenty_s: float | None = None  # when two live peers last held it
    lost: bool = False  # no live peer held it at a check

    @property
    def owner(self) -> tuple[Key, PeerId, str | None]:
        return self.key, self.writer, self.subkey

    def must_be_found(self, now_s: float) -> bool:
        """Return whether readers must find the entry."""
        return self.acknowledged_s is not None and self.replaced_s is None and now_s < self.expires_s


class Ledger:
    """All writes, by the number that is their value."""

    def __init__(self) -> None:
        self.writes: dict[int, RecordedWrite] = {}
        self._latest: dict[tuple[Key, PeerId, str | None], RecordedWrite] = {}

    def begin(
        self, key: Key, subkey: str | None, writer: PeerId, now_s: float, expires_s: float
    ) -> RecordedWrite:
        """Record the beginning of a write, and return it. The value to store is its number."""
        write = RecordedWrite(
            number=len(self.writes), key=key, subkey=subkey, writer=writer, begun_s=now_s, expires_s=expires_s
        )
        self.writes[write.number] = write
        self.replace(write.owner, now_s)
        self._latest[write.owner] = write
        return write

    def replace(self, owner: tuple[Key, PeerId, str | None], now_s: float) -> None:
        """Record that the owner's entry is being deleted or replaced."""
        old = self._latest.pop(owner, None)
        if old is not None:
            old.replaced_s = now_s

    def owned(self, writer: PeerId) -> list[RecordedWrite]:
        """Return the latest writes of this writer, one per key and subkey."""
        return [write for write in self._latest.values() if write.writer == writer]

    def living(self, now_s: float) -> list[RecordedWrite]:
        """Return the writes that must be found."""
        for owner in [owner for owner, write in self._latest.items() if write.expires_s < now_s]:
            del self._latest[owner]
        return [write for write in self._latest.values() if write.must_be_found(now_s)]


class Violations:
    """Broken promises. Only the first fifty lines are kept."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def add(self, now_s: float, text: str) -> None:
        self.count += 1
        if len(self.lines) < _VIOLATIONS_MAX:
            self.lines.append(f"{now_s:.1f} s: {text}")


@dataclass(slots=True, eq=False)
class Authorship:
    """Checker: every entry was written by its stated writer, so that nothing is forged, mixed up, or
    overwritten by another peer.
    """

    ledger: Ledger
    violations: Violations

    def entry(
        self, where: str, key: Key, writer: PeerId, subkey: str | None, value: Any, now_s: float
    ) -> RecordedWrite | None:
        """Return the write of an entry that a reader received or a replica holds, or None (a violation) when
        that write does not exist.
        """
        write = self.ledger.writes.get(value) if isinstance(value, int) else None
        if write is None or write.owner != (key, writer, subkey):
            self.violations.add(
                now_s, f"{where}: {writer.short} never wrote {value!r} under {key} {subkey or ''}"
            )
            return None
        return write


@dataclass(slots=True, eq=False)
class Expiry:
    """Checker: readers receive no expired entry, by their own clock or, within the error of clocks, by the
    true time.
    """

    violations: Violations

    def read(
        self, reader: SwarmMember, entry: Entry, write: RecordedWrite, begun_s: float, begun_own_s: float
    ) -> None:
        if entry.expiration <= begun_own_s:
            self.violations.add(
                begun_s, f"{reader.peer.index} read entry {write.number}, which had expired by its own clock"
            )
        late_s = begun_s - (entry.expiration - EPOCH_UNIX_S)
        if late_s > abs(reader.peer.clock.error_s) + _CLOCK_SLACK_S:
            self.violations.add(
                begun_s, f"{reader.peer.index} read entry {write.number} {late_s:.1f} s after its expiration"
            )


@dataclass(slots=True, eq=False)
class Survival:
    """Checker: while an acknowledged record lives, a live peer holds it, unless all of its holders left
    within `repair_s`, which no protocol can survive (counted in `lost_with_holders`).
    """

    ledger: Ledger
    authorship: Authorship
    violations: Violations
    repair_s: float
    lost_with_holders: int = 0

    def check(self, members: Sequence[SwarmMember], now_s: float) -> None:
        """Check the storage of every live peer. Call it often, compared with `repair_s`."""
        holders: collections.Counter[int] = collections.Counter()
        for member in members:
            storage, now_us = member.service.storage, int((EPOCH_UNIX_S + now_s) * 1e6)
            for key in storage.keys():  # noqa: SIM118 - a method, not a mapping
                for record in storage.records(key, now_us):
                    if not record.deleted:
                        value, where = decode_value(record.value), f"peer {member.peer.index} holds"
                        write = self.authorship.entry(where, key, record.writer, record.subkey, value, now_s)
                        if write is not None:
                            holders[write.number] += 1
        for write in self.ledger.living(now_s):
            self._note(write, holders[write.number], now_s)

    def _note(self, write: RecordedWrite, holders: int, now_s: float) -> None:
        if holders >= 2 or write.last_plenty_s is None:
            write.last_plenty_s = now_s
        if holders or write.lost or now_s < (write.acknowledged_s or 0.0) + _CLOCK_SLACK_S:
            return
        write.lost = True
        alone_s = now_s - write.last_plenty_s
        if alone_s < self.repair_s:
            self.lost_with_holders += 1
        else:
            left_s = write.expires_s - now_s
            text = f"no peer holds entry {write.number} ({write.key}), {left_s:.0f} s before its expiration; "
            self.violations.add(now_s, f"{text}{alone_s:.0f} s ago two peers held it")


@dataclass(slots=True, eq=False)
class Deadlines:
    """Checker: every operation ends by its deadline."""

    violations: Violations
    slack_s: float = 0.05  # of virtual time, which only timers consume
    pending: dict[int, tuple[str, float]] = field(default_factory=dict)
    begun: int = 0

    def begin(self, what: str, deadline_s: float) -> int:
        self.begun += 1
        self.pending[self.begun] = (what, deadline_s)
        return self.begun

    def end(self, number: int, now_s: float) -> None:
        if number not in self.pending:  # it was reported before it ended
            return
        what, deadline_s = self.pending.pop(number)
        if now_s > deadline_s + self.slack_s:
            self.violations.add(now_s, f"{what} ended {now_s - deadline_s:.2f} s after its deadline")

    def check(self, now_s: float) -> None:
        """Report operations that have not ended by their deadline."""
        for number, (what, deadline_s) in list(self.pending.items()):
            if now_s > deadline_s + self.slack_s:
                self.violations.add(
                    now_s, f"{what} has not ended {now_s - deadline_s:.2f} s after its deadline"
                )
                del self.pending[number]


class CheckLimits:
    """Checker: every collection that can be reached from a service through attributes, and the tasks, stay
    under their limits.

    `limits` sets the limits of single attributes, and caches have their own; any other collection may have
    `default_max` entries, so that a long run also finds unexpected unbounded growth. `largest` holds the
    maximum of each.
    """

    def __init__(
        self, violations: Violations, limits: Mapping[str, int] | None = None, default_max: int = 10_000
    ) -> None:
        self.largest: dict[str, int] = {}
        self._violations = violations
        self._limits = dict(limits or {})
        self._default_max = default_max

    def check(self, members: Iterable[SwarmMember], now_s: float) -> None:
        for member in members:
            sizes = dict(sizes_of(member.service))
            sizes["tasks"] = len(member.peer.supervisor.running)
            sizes["calls in progress"] = len(member.peer.handling)
            for name, size in sizes.items():
                self.check_size(member.peer.index, name, size, now_s)
            storage = member.service.storage
            if storage.size_bytes > storage.quotas.bytes_max:
                self._violations.add(now_s, f"peer {member.peer.index} stores {storage.size_bytes} bytes")

    def check_size(self, index: int, name: str, size: int, now_s: float) -> None:
        """Check one collection of the peer with this index. `name`: its path of attribute names."""
        self.largest[name] = max(size, self.largest.get(name, 0))
        size_max = self._limits.get(name, _CACHES_MAX.get(name.rpartition(".")[2], self._default_max))
        if size > size_max:
            self._violations.add(now_s, f"peer {index}: {name} has {size} entries, more than {size_max}")


def sizes_of(root: object) -> Iterator[tuple[str, int]]:
    """Yield (path of attribute names, length) for every collection that belongs to `root`, through objects of
    this project, at most `_DEPTH_MAX` levels deep, by the shortest path to each.
    """
    pending: collections.deque[tuple[str, object, int]] = collections.deque([("", root, 0)])
    seen: set[int] = set()
    while pending:
        path, value, depth = pending.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for name in _attributes(value):
            part = getattr(value, name, None)
            where = f"{path}.{name}" if path else name
            if isinstance(part, dict | list | set | collections.deque):
                yield where, len(part)
            elif (
                depth < _DEPTH_MAX
                and type(part).__module__.startswith(_PACKAGES)
                and not type(part).__module__.startswith("swarm.testing")
            ):
                pending.append((where, part, depth + 1))


def _attributes(value: object) -> list[str]:
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(value, "__dict__", {}), *slots]


class ConnectedSwarm:
    """Checker: after healing, every live peer reaches every other through routing tables alone."""

    def __init__(self, violations: Violations) -> None:
        self._violations = violations

    def parts(self, members: Sequence[SwarmMember]) -> int:
        """Return the number of islands (peers that all reach each other) in the tables: 1 is a whole
        swarm.
        """
        by_id = {member.peer.peer_id: number for number, member in enumerate(members)}
        known = [
            [by_id[contact.peer_id] for contact in member.service.overlay.table if contact.peer_id in by_id]
            for member in members
        ]
        knowing: list[list[int]] = [[] for _ in members]
        for number, others in enumerate(known):
            for other in others:
                knowing[other].append(number)
        left, islands = set(range(len(members))), 0
        while left:
            start = min(left)
            left -= _reached(start, known) & _reached(start, knowing)
            islands += 1
        return islands

    def check(self, members: Sequence[SwarmMember], now_s: float) -> None:
        islands = self.parts(members)
        if islands > 1:
            self._violations.add(now_s, f"the swarm of {len(members)} has fallen into {islands} parts")


def _reached(start: int, edges: Sequence[Sequence[int]]) -> set[int]:
    found, pending = {start}, [start]
    while pending:
        for other in edges[pending.pop()]:
            if other not in found:
                found.add(other)
                pending.append(other)
    return found
