"""Workload of a scenario: many writers store, delete and read, and every result is checked against the
ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from swarm.core.errors import SwarmError, UsageError
from swarm.core.ids import Key
from swarm.dht.logic.records import encode_value
from swarm.testing.chance import Chance
from swarm.testing.checkers import Authorship, Expiry, Ledger, RecordedWrite, Violations
from swarm.testing.dht_swarm import DhtSwarm, SwarmMember
from swarm.testing.virtual_loop import EPOCH_UNIX_S

_TIMEOUT_S = 10.0
_GRACE_S = 2.0  # an entry this close to its expiration may be seen or not: clocks differ


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkConfig:
    """Amount of work."""

    operations_per_s: float = 1.0
    keys: int = 40
    ttl_s: tuple[float, float] = (120.0, 900.0)


@dataclass(slots=True)
class OperationCounts:
    """Counters of operations and their results."""

    stores: int = 0
    stores_failed: int = 0
    deletions: int = 0
    reads: int = 0  # reads of keys with a known living entry
    reads_complete: int = 0  # reads that found every living entry
    reads_failed: int = 0  # reads without an answer


class Workload:
    """Operations by peers that are drawn from the seed."""

    def __init__(
        self, swarm: DhtSwarm, ledger: Ledger, violations: Violations, chance: Chance, config: WorkConfig
    ) -> None:
        self.ledger = ledger
        self.counts = OperationCounts()
        self.authorship = Authorship(ledger, violations)
        self._expiry = Expiry(violations)
        self._violations = violations
        self._swarm = swarm
        self._chance = chance
        self._config = config
        self._keys = [
            Key("public", f"thing-{number}") if number % 3 else Key("run.sim", f"thing-{number}")
            for number in range(config.keys)
        ]

    async def run(self, until_s: float, group: asyncio.TaskGroup) -> None:
        """Begin operations until `until_s`, each in its own task."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._chance.expovariate(self._config.operations_per_s))
            if loop.time() >= until_s:
                return
            live = self._swarm.live
            if live:
                member, drawn = self._chance.choice(live), self._chance.random()
                operation = self.store if drawn < 0.45 else self.delete if drawn < 0.55 else self.read
                group.create_task(operation(member))

    async def store(self, member: SwarmMember) -> None:
        key = self._chance.choice(self._keys)
        ttl_s = self._chance.uniform(*self._config.ttl_s)
        subkey = (
            str(member.peer.peer_id)
            if key.namespace.startswith("run.")
            else self._chance.choice([None, "a", "b"])
        )
        # the entry's expiration is by the writer's clock, hence within that clock's error of the true time
        expires_s = _now_s() + ttl_s + min(member.peer.clock.error_s, 0.0)
        write = self.ledger.begin(key, subkey, member.peer.peer_id, _now_s(), expires_s)
        self.counts.stores += 1
        try:
            result = await member.service.store(
                key, write.number, ttl_s=ttl_s, subkey=subkey, timeout_s=_TIMEOUT_S
            )
        except UsageError:  # its clock was ahead when it wrote before, and is not any more
            self.counts.stores_failed += 1
            return
        # a single replica may die at any moment: an entry counts as stored when two hold it, if there are two
        if result.replicas >= min(2, len(self._swarm.live)) and member.peer.up:
            write.acknowledged_s = _now_s()
        else:
            self.counts.stores_failed += 1

    async def delete(self, member: SwarmMember) -> None:
        owned = self.ledger.owned(member.peer.peer_id)
        if not owned:
            return
        write = self._chance.choice(owned)
        self.ledger.replace(write.owner, _now_s())
        self.counts.deletions += 1
        # the deletion begins with a read, which may remain unanswered
        with contextlib.suppress(SwarmError):
            await member.service.delete(write.key, subkey=write.subkey, timeout_s=_TIMEOUT_S)

    async def read(self, member: SwarmMember) -> None:
        key = self._chance.choice(self._keys)
        missing = await self.missing(member, key)
        if missing is None:
            self.counts.reads_failed += 1

    async def missing(self, member: SwarmMember, key: Key) -> list[RecordedWrite] | None:
        """Read a key and check every entry. Return the living entries that were not found, or None when no
        peer answered.
        """
        begun_s, begun_own_s = _now_s(), member.peer.clock.swarm_s()
        wanted = [write for write in self.ledger.living(begun_s) if write.key == key and not write.lost]
        try:
            entries = await member.service.get_all(key, timeout_s=_TIMEOUT_S)
        except SwarmError:
            return None
        found = set()
        for entry in entries:
            write = self.authorship.entry(
                f"{member.peer.index} read", key, entry.writer, entry.subkey, entry.value, _now_s()
            )
            if write is not None:
                self._expiry.read(member, entry, write, begun_s, begun_own_s)
                found.add(write.number)
        missing = [
            write
            for write in wanted
            if write.number not in found and write.must_be_found(_now_s() + _GRACE_S)
        ]
        if wanted:
            self.counts.reads += 1
            self.counts.reads_complete += not missing
        return missing

    async def audit(self, readers: Sequence[SwarmMember]) -> int:
        """Check, in a swarm without faults, that every living record is found by a peer drawn for each key.
        Return the number of keys that were read.
        """
        asked = 0
        for key in self._keys:
            member = self._chance.choice(readers)
            missing = await self.missing(member, key)
            asked += 1
            if missing is None:
                self._violations.add(
                    _now_s(), f"no peer answered {member.peer.index}, which reads {key} in a healed swarm"
                )
            for write in missing or []:
                if not write.lost:
                    now_s = _now_s()
                    text = (
                        f"{member.peer.index} does not find entry {write.number} under {key} in a healed"
                        f" swarm, {now_s - write.begun_s:.0f} s after its writing,"
                        f" {write.expires_s - now_s:.0f} s before its expiration"
                    )
                    self._violations.add(now_s, f"{text}; {self._holders(write)}")
        return asked

    def _holders(self, write: RecordedWrite) -> str:
        """Describe the holders of an entry and their ranks by distance among the live peers: the replicas are
        0 to 4.
        """
        live = sorted(self._swarm.live, key=lambda member: member.peer.peer_id.dht_id ^ write.key.dht_id)
        now_us = int((EPOCH_UNIX_S + _now_s()) * 1e6)
        ranks = [
            f"peer {member.peer.index} (nearest but {rank})"
            for rank, member in enumerate(live)
            if any(
                record.value == encode_value(write.number)
                for record in member.service.storage.records(write.key, now_us)
            )
        ]
        return f"written by {self._swarm.network.peers[write.writer].index}, held by " + (
            ", ".join(ranks) or "no peer"
        )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
