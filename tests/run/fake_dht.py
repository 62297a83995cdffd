"""A store of DHT records in memory, for tests of what is published there."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from swarm.core.errors import NetworkError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, Key, PeerId
from swarm.dht.service.dht_service import StoreResult
from swarm.run.directory import RunDirectory

NOW_S = 1_000_000.0


class FixedClock:
    def monotonic_s(self) -> float:
        return NOW_S

    def swarm_s(self) -> float:
        return NOW_S


@dataclass(frozen=True)
class FakeEntry:
    value: Any
    subkey: str | None
    writer: PeerId
    expiration: float


class FakeDht:
    """A shared store of records; `as_peer` returns one peer's view of it."""

    def __init__(self) -> None:
        self.entries: dict[tuple[Key, PeerId, str | None], FakeEntry] = {}
        self.stores = 0
        self.refuses = False
        self.failing_reads = 0  # number of next reads that raise NetworkError

    def as_peer(self, own: PeerId) -> Any:
        dht = self

        class View:
            def own(self) -> Contact:
                return Contact(own, (Address.parse("/ip4/203.0.113.7/tcp/4000"),))

            async def store(
                self,
                key: Key,
                value: Any,
                *,
                ttl_s: float,
                subkey: str | None = None,
                timeout_s: float = 10.0,
            ) -> StoreResult:
                if dht.refuses:
                    return StoreResult(False, 0)
                dht.stores += 1
                dht.entries[key, own, subkey] = FakeEntry(value, subkey, own, NOW_S + ttl_s)
                return StoreResult(True, 1)

            async def store_blob(
                self, key: Key, blob: bytes, *, ttl_s: float, timeout_s: float = 10.0
            ) -> StoreResult:
                return await self.store(key, blob, ttl_s=ttl_s)

            async def get_all(
                self, key: Key, *, latest: bool = False, timeout_s: float = 10.0
            ) -> list[FakeEntry]:
                if dht.failing_reads:
                    dht.failing_reads -= 1
                    raise NetworkError("none of the 1 peers asked answered")
                return [entry for (stored, _, _), entry in dht.entries.items() if stored == key]

        return View()

    def directory(self, own: PeerId | None = None) -> RunDirectory:
        own = own or Identity.generate().peer_id
        return RunDirectory(self.as_peer(own), clock=FixedClock(), rng=random.Random(0))
