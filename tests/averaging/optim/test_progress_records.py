"""Progress records in the DHT: when a peer writes its own record, and which records of others it reads."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from averaging.blocklist import PeerBlocklist
from averaging.optim.progress.logic.reports import ProgressReport
from averaging.optim.progress.records import ProgressRecords
from averaging.optim.progress.tree import Tree
from swarm.core.ids import Key
from swarm.dht.logic.records import Entry
from swarm.dht.service.dht_service import DhtService
from tests.averaging.optim.progress_dht import REPORTED, Dht, contact, entry


def records_of(dht: Dht) -> ProgressRecords:
    service = cast(DhtService, dht)
    return ProgressRecords(lambda: contact(1), service, dht, Tree(service, "run", contact(1).peer_id, 1000.0))


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


def test_a_peer_that_waits_is_there_although_its_values_are_old() -> None:
    """Regression test: a record with the time of the last step expired before the next record."""
    dht = Dht()
    records = records_of(dht)

    async def scenario() -> None:
        for samples, at_s in ((100, 1000.0), (101, 1004.9), (102, 1005.0)):
            dht.now_s = at_s
            await records.publish(replace(REPORTED, samples=samples))

    asyncio.run(scenario())
    assert [value["at"] for _, value in dht.stored] == [1000.0, 1000.0, 1005.0]


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
        blocklist = PeerBlocklist(contact(1).peer_id, dht)
        blocklist.ban({contact(3).peer_id})
        found = await records.read(blocklist)
        assert [one.writer for one in found or ()] == [contact(2).peer_id]
        dht.found = None
        assert await records.read(blocklist) == []

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


def test_contacts_of_peers_that_left_are_kept_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.optim.progress.records.PEERS_MAX", 2)
    records = records_of(Dht())
    records.reports([entry(2), entry(3)])
    records.reports([entry(2)])
    assert records.contacts.keys() == {contact(2).peer_id, contact(3).peer_id}
    records.reports([entry(2), entry(4)])
    assert records.contacts.keys() == {contact(2).peer_id, contact(4).peer_id}


def test_no_stranger_is_told_at_an_address_of_this_peer_or_of_a_member() -> None:
    """Regression: each identity of a crowd that named a member's address cost both a TLS handshake."""
    records = records_of(Dht())
    at = {number: [one.multiaddr for one in contact(number).addresses] for number in (1, 2, 3)}
    records.reports([entry(2), entry(3), entry(8, addresses=at[1]), entry(9, addresses=[*at[3], *at[2]])])
    member, honest, *liars = (contact(number).peer_id for number in (2, 3, 8, 9))
    assert records.relays([member]) == [member]
    assert records.relays([honest, *liars], [member]) == [honest]


def test_a_newcomer_asks_more_peers_when_the_replicas_know_nobody() -> None:
    """Regression test: fresh replicas lacked the records, and a newcomer founded the run again."""

    class FreshReplicas(Dht):
        asked = 0

        async def get(self, key: Key, *, latest: bool = False, **how: Any) -> dict[str, Entry] | None:
            self.asked += 1
            return {"2": entry(2)} if latest else None

    async def scenario() -> None:
        dht, nobody = FreshReplicas(), PeerBlocklist(contact(1).peer_id, cast(Any, Dht()))
        records = records_of(dht)
        assert await records.read(nobody) == []
        found = await records.read(nobody, thorough=True)
        assert found is not None
        assert [one.writer for one in found] == [contact(2).peer_id]
        assert dht.asked == 3

    asyncio.run(scenario())
