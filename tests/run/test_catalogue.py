"""The catalogue of open runs: which runs are listed, and that many identities hide none of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from swarm.core.errors import PeerError
from swarm.core.identity import Identity
from swarm.core.ids import Address, Contact, Key, PeerId
from swarm.dht.logic.namespaces import Namespaces
from swarm.dht.logic.records import Entry, encode_value
from swarm.dht.logic.run_rules import CATALOGUE, CATALOGUE_RULES
from swarm.dht.logic.storage import Quotas, Storage
from swarm.run import catalogue
from swarm.run.catalogue import (
    SHOWN_MAX,
    CatalogueEntry,
    by_turns,
    catalogue_key,
    entry_value,
    read_catalogue,
    read_entry,
)
from swarm.run.signed import SignedSpecification, sign
from swarm.run.specification import RunSpecification
from swarm.testing.records import made_record
from tests.run.fake_dht import FakeDht


def a_run(owner: Identity, name: str = "tiny", members: str = "open") -> SignedSpecification:
    table = {
        "name": name,
        "members": members,
        "target_batch_size": 64,
        "batch_size": 8,
        "task": {"name": "bytelm"},
    }
    return sign(RunSpecification.from_table(table, "test"), owner, version=1, created_s=0.0)


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def member(number: int, host: str = "203.0.113.7") -> Contact:
    return Contact(peer(number), (Address.parse(f"/ip4/{host}/tcp/{4000 + number % 1000}"),))


def entry_of(signed: SignedSpecification, by: Contact) -> Entry:
    return Entry(
        value=entry_value(signed, by),
        subkey=signed.run_id,
        writer=by.peer_id,
        issued_at=0.0,
        expiration=3600.0,
    )


def listed(number: int, host: str, founder: int | None = None) -> CatalogueEntry:
    return CatalogueEntry(
        name="tiny",
        run_id=f"run {number}",
        founder=peer(founder if founder is not None else number),
        member=member(number, host),
    )


def test_open_runs_are_listed_when_they_are_published_and_others_are_not() -> None:
    dht, owner = FakeDht(), Identity.generate()
    for signed in (a_run(owner), a_run(owner, "closed", "invited")):
        asyncio.run(dht.directory(owner.peer_id).publish(signed))
    in_catalogue = [key for key, _, _ in dht.entries if key.namespace == CATALOGUE]
    assert in_catalogue == [catalogue_key(owner.peer_id)]

    async def answers(contact: Contact) -> bool:
        return True

    view: Any = dht.as_peer(peer(1))
    (found,) = asyncio.run(read_catalogue(view, answers))
    assert (found.name, found.run_id) == ("tiny", a_run(owner).run_id)


def test_an_entry_stands_in_its_own_place_only() -> None:
    owner = Identity.generate()
    signed, key = a_run(owner), catalogue_key(owner.peer_id)
    entry = entry_of(signed, member(1))
    assert read_entry(key, entry).run_id == signed.run_id
    other = next(Key(CATALOGUE, str(shard)) for shard in range(16) if Key(CATALOGUE, str(shard)) != key)
    value: Any = entry.value
    for wrong_key, wrong in (
        (other, entry),
        (key, replace(entry, subkey="a" * 20)),
        (key, replace(entry, value={**value, "name": "other"})),
        (key, replace(entry, value={**value, "name": "a\x1b[31m"})),
        (key, replace(entry, value={**value, "owner": b"nobody"})),
        (key, replace(entry, value={**value, "owner": [0] * 38})),
        (key, replace(entry, value={**value, "recovery_key": [0] * 38})),
        (key, replace(entry, value={**value, "addresses": ["nowhere"]})),
        (key, replace(entry, value=[])),
        (key, replace(entry, value={})),
    ):
        with pytest.raises(PeerError):
            read_entry(wrong_key, wrong)


def test_networks_take_turns_and_then_founders() -> None:
    crowd = [listed(number, f"198.51.100.{number % 250}") for number in range(1000)]
    prolific = [listed(2000 + number, "192.0.2.9", founder=7777) for number in range(50)]
    honest = [listed(3000 + number, f"203.0.{number}.7") for number in range(20)]
    order = by_turns([*crowd, *prolific, *honest, listed(4000, "192.0.2.10")])
    places = {one.run_id: place for place, one in enumerate(order)}
    assert max(places[one.run_id] for one in honest) < 22
    assert places["run 4000"] < 50  # the owner with many runs shares the turns of its network
    known = by_turns([*crowd, *honest], known={peer(3019)})
    assert known[0].run_id == "run 3019"


def test_a_crowd_of_dead_and_copied_entries_hides_no_run_that_answers() -> None:
    """Members of the crowd claim addresses in many networks, and answer at none of them. They list the honest
    run, too.
    """
    dht, owner = FakeDht(), Identity.generate()
    signed = a_run(owner)
    key = catalogue_key(owner.peer_id)
    honest = member(1)
    entries = [entry_of(signed, honest)]
    entries += [entry_of(signed, member(number, f"198.51.{number}.1")) for number in range(2, 40)]
    asked: list[PeerId] = []

    async def answers(contact: Contact) -> bool:
        asked.append(contact.peer_id)
        return contact.peer_id == honest.peer_id

    class Dht:
        async def get_all(self, of: Key, **options: Any) -> list[Entry]:
            return entries if of == key else []

    view: Any = Dht()
    (found,) = asyncio.run(read_catalogue(view, answers))
    assert found.member == honest
    assert len(asked) <= 40
    assert not dht.entries


def test_a_reader_calls_a_bounded_number_of_members(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = [listed(number, f"198.51.{number % 250}.{number // 250}") for number in range(1000)]
    monkeypatch.setattr(catalogue, "read_entry", lambda key, entry: entry)
    asked: list[PeerId] = []

    class Dht:
        async def get_all(self, of: Key, **options: Any) -> list[CatalogueEntry]:
            return crowd if of.name == "0" else []

    async def dead(contact: Contact) -> bool:
        asked.append(contact.peer_id)
        return False

    async def alive(contact: Contact) -> bool:
        return True

    view: Any = Dht()
    assert not asyncio.run(read_catalogue(view, dead))
    assert len(asked) == 300
    assert len(asyncio.run(read_catalogue(view, alive))) == SHOWN_MAX


def test_a_flood_of_lighter_entries_pushes_no_listed_run_out_of_a_replica() -> None:
    """Under other keys, a stranger's lighter record replaces a heavier one."""
    namespaces, now_us = Namespaces(), 1_000_000_000_000
    storage = Storage(Quotas(), namespaces.entries_per_writer_max, key_quota=namespaces.entries_max)
    owner = Identity.generate()
    signed, key = a_run(owner), catalogue_key(owner.peer_id)
    value, light = (
        encode_value(entry_value(signed, member(1))),
        encode_value({"name": "a", "owner": b"", "addresses": []}),
    )
    honest = made_record(key, value, member(1).peer_id, now_us, subkey=signed.run_id)
    assert namespaces.refusal(honest) is None
    assert storage.store(honest, now_us) is None
    refused = 0
    for number in range(2, 402):
        record = made_record(key, light, peer(number), now_us, ttl_s=60.0, subkey=str(number))
        assert namespaces.refusal(record) is None
        refused += storage.store(record, now_us) is not None
    assert refused == 400 + 1 - (CATALOGUE_RULES.entries_max or 0)
    assert honest in storage.records(key, now_us)
    later_us = now_us + 1_000_000
    renewed = made_record(key, value, member(1).peer_id, later_us, subkey=signed.run_id)
    assert storage.store(renewed, later_us) is None


def test_an_owner_has_a_quota_under_its_key() -> None:
    namespaces = Namespaces()
    assert namespaces.entries_per_writer_max(Key(CATALOGUE, "3")) == 4
