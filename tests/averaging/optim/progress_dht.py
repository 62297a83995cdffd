"""A DHT of invented progress records."""

from __future__ import annotations

from typing import Any

from averaging.optim.progress.logic.reports import ProgressReport
from swarm.core.errors import NetworkError
from swarm.core.ids import Address, Contact, Key, PeerId
from swarm.dht.logic.records import Entry

REPORTED = ProgressReport(epoch=3, samples=100, rate=10.0, at_s=1000.0, since_s=990.0)


def contact(number: int) -> Contact:
    return Contact(PeerId(bytes([number]) * 32), (Address("127.0.0.1", 4000 + number),))


def entry(number: int, **changes: Any) -> Entry:
    value = {
        **REPORTED.encode(),
        "addresses": [address.multiaddr for address in contact(number).addresses],
        **changes,
    }
    return Entry(
        value=value, subkey=str(number), writer=contact(number).peer_id, issued_at=1000.0, expiration=1015.0
    )


class Dht:
    """A DHT that keeps stored values with their time."""

    def __init__(self) -> None:
        self.stored: list[tuple[float, dict[str, Any]]] = []
        self.deleted = 0
        self.found: dict[str, Entry] | None = {}
        self.works = True
        self.now_s = 1000.0

    def swarm_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        return self.now_s

    async def store(self, key: Key, value: dict[str, Any], **how: Any) -> None:
        if not self.works:
            raise NetworkError("nobody answers")
        self.stored.append((self.now_s, value))

    async def delete(self, key: Key, **how: Any) -> None:
        self.deleted += 1

    async def get(self, key: Key, **how: Any) -> dict[str, Entry] | None:
        return self.found
