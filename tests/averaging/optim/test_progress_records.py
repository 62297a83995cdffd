"""Progress records in the DHT: when a peer writes its own, and which records of others it reads."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

from averaging.optim.admission import Blocklist
from averaging.optim.progress.logic.reports import ProgressConfig, ProgressReport
from averaging.optim.progress.records import ProgressRecords
from averaging.optim.progress.tree import Tree
from swarm.core.errors import NetworkError
from swarm.core.ids import Address, Contact, Key, PeerId
from swarm.dht.logic.records import Entry
from swarm.dht.service.dht_service import DhtService

CONFIG = ProgressConfig(report_ttl_s=15.0, peers_max=2)
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


def records_of(dht: Dht) -> ProgressRecords:
    service = cast(DhtService, dht)
    return ProgressRecords(
        lambda: contact(1), service, dht, Tree(service, "run", contact(1).peer_id, CONFIG, 1000.0), CONFIG
    )


def test_a_record_is_written_when_it_is_new_or_a_third_of_its_ttl_is_over() -> None:
    dht = Dht()
    records = records_of(dht)

    async def publish(at_s: float, report: ProgressReport = REPORTED) -> None:
        dht.now_s = at_s
        await records.publish(report)

    async def scenario() -> None:
        await publish(1000.0)
        await publish(1004.9)
        assert len(dht.stored) == 1
        await publish(1005.0)
        assert len(dht.stored) == 2, "it expires after 15 s"
        assert dht.stored[-1][1]["at"] == 1005.0, "who has not moved still lives"
        await publish(1005.1, replace(REPORTED, samples=101))
        assert [at_s for at_s, _ in dht.stored] == [1000.0, 1005.0, 1005.1]
        records.invalidate()
        await publish(1005.2, replace(REPORTED, samples=101))
        assert len(dht.stored) == 4
        dht.works = False
        await publish(1006.0, replace(REPORTED, samples=102))
        dht.works = True
        await publish(1006.1, replace(REPORTED, samples=102))
        assert len(dht.stored) == 5, "what was not written is tried again"

    asyncio.run(scenario())


def test_only_a_written_record_is_withdrawn() -> None:
    dht = Dht()
    records = records_of(dht)

    async def scenario() -> None:
        await records.withdraw(1.0)
        assert dht.deleted == 0
        await records.publish(REPORTED)
        await records.withdraw(1.0)
        assert dht.deleted == 1

    asyncio.run(scenario())


def test_records_of_banned_peers_are_not_read() -> None:
    dht = Dht()
    records = records_of(dht)

    async def scenario() -> None:
        dht.found = {str(number): entry(number) for number in (2, 3)}
        found = await records.read(Blocklist(peers=frozenset({contact(3).peer_id})))
        assert [one.writer for one in found or ()] == [contact(2).peer_id]
        dht.found = None
        assert await records.read(Blocklist()) == []

    asyncio.run(scenario())


def test_only_well_formed_reports_are_read() -> None:
    dht = Dht()
    records = records_of(dht)
    heard, newcomers = records.reports(
        [
            entry(1),
            entry(2),
            entry(3, samples=-1),
            entry(4, total="a word about shards"),
            entry(5, addresses=7),
        ]
    )
    assert heard == [(contact(2).peer_id, REPORTED, 1015.0)]
    assert newcomers == [contact(2).peer_id]
    _, newcomers = records.reports([entry(2), entry(6)])
    assert newcomers == [contact(6).peer_id]


def test_contacts_of_peers_that_left_are_kept_while_there_is_room() -> None:
    records = records_of(Dht())
    records.reports([entry(2), entry(3)])
    records.reports([entry(2)])
    assert records.contacts.keys() == {contact(2).peer_id, contact(3).peer_id}
    records.reports([entry(2), entry(4)])
    assert records.contacts.keys() == {contact(2).peer_id, contact(4).peer_id}
