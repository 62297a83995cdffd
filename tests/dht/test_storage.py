"""Tests of the storage against a model, under any sequence of stores and waits."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm.core.ids import Key, PeerId
from swarm.core.standing import PeerStanding
from swarm.dht.logic.records import Record
from swarm.dht.logic.storage import Quotas, Storage, latest_by_owner

WRITERS = [PeerId(bytes([number]) * 32) for number in range(3)]
KEYS = [Key("public", name) for name in "ab"]


def record_of(issued: int, ttl: int, writer: int = 0, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "key": KEYS[0],
        "subkey": None,
        "value": b"v",
        "issued_at_us": issued,
        "expiration_us": issued + ttl,
        "writer": WRITERS[writer],
        "signature": bytes(64),
    }
    return Record(**{**fields, **changes})


@dataclass
class Story:
    """Everything that was ever accepted from one owner."""

    records: list[Record]

    def shown(self, now_us: int) -> Record | None:
        newest = max(self.records, key=lambda record: record.version)
        return newest if newest.expiration_us > now_us else None


class AgainstAModel(RuleBasedStateMachine):
    """A model that keeps every accepted record forever, and answers by searching all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = Storage()
        self.now_us = 1000
        self.stories: dict[tuple[Key, PeerId, str | None], Story] = {}
        self.offered: list[Record] = []

    def offer(self, record: Record) -> None:
        owner = (record.key, record.writer, record.subkey)
        story = self.stories.get(owner)
        before = self.snapshot()
        refused = self.storage.store(record, self.now_us, far=record.issued_at_us % 3 == 0)
        # The slot of an owner is reserved until the last of its accepted records would have expired.
        held = story is not None and any(old.expiration_us > self.now_us for old in story.records)
        newest = (
            max((old.version for old in story.records), default=(-1, b"")) if story and held else (-1, b"")
        )
        if record.expiration_us <= self.now_us or record.version < newest:
            assert refused
        elif record.version == newest:
            assert story is not None
            assert (refused is None) == (story.shown(self.now_us) is not None)
        else:
            assert refused is None
            self.stories[owner] = Story([*(story.records if story and held else []), record])
        if refused:
            assert self.snapshot() == before

    def snapshot(self) -> list[list[Record]]:
        return [sorted(self.storage.records(key, self.now_us), key=repr) for key in KEYS]

    @rule(
        key=st.sampled_from(KEYS),
        writer=st.integers(0, 2),
        subkey=st.sampled_from([None, "", "x"]),
        age=st.integers(-30, 60),
        ttl=st.integers(1, 120),
        deleted=st.booleans(),
        signature=st.sampled_from([b"a", b"b"]),
        size=st.integers(0, 50),
    )
    def store(
        self,
        key: Key,
        writer: int,
        subkey: str | None,
        age: int,
        ttl: int,
        deleted: bool,
        signature: bytes,
        size: int,
    ) -> None:
        record = record_of(
            self.now_us - age,
            ttl,
            writer,
            key=key,
            subkey=subkey,
            deleted=deleted,
            signature=signature,
            value=b"" if deleted else bytes(size),
        )
        self.offered.append(record)
        self.offer(record)

    @precondition(lambda self: self.offered)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        self.offer(data.draw(st.sampled_from(self.offered)))

    @rule(duration_us=st.integers(1, 80))
    def wait(self, duration_us: int) -> None:
        self.now_us += duration_us
        if duration_us % 2:
            self.storage.expire(self.now_us)

    @invariant()
    def shows_what_the_model_shows(self) -> None:
        for key in KEYS:
            expected = [
                story.shown(self.now_us)
                for (owner_key, _, _), story in self.stories.items()
                if owner_key == key
            ]
            assert set(self.storage.records(key, self.now_us)) == {
                record for record in expected if record is not None
            }

    @invariant()
    def counts_what_it_holds(self) -> None:
        slots = [slot for owned in self.storage._slots.values() for slot in owned.values()]
        assert self.storage.entry_count == len(slots)
        assert self.storage.size_bytes == sum(slot.size_bytes for slot in slots)
        assert sum(usage.entries for usage in self.storage._by_writer.values()) == len(slots)
        assert sum(usage.entries for usage in self.storage._by_key_and_writer.values()) == len(slots)
        assert self.storage.far_bytes == sum(slot.size_bytes for slot in slots if slot.far)
        assert sum(usage.size_bytes for usage in self.storage._by_key.values()) == self.storage.size_bytes
        assert len(self.storage._due) <= 64 + 4 * (len(slots) + 1)

    def teardown(self) -> None:
        self.storage.expire(self.now_us + 10_000)
        assert (
            self.storage.entry_count,
            self.storage.size_bytes,
            self.storage._slots,
            self.storage._by_key,
        ) == (0, 0, {}, {})
        assert self.storage._by_writer == {}


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_writer_cannot_overwrite_another() -> None:
    storage = Storage()
    assert storage.store(record_of(10, 100, writer=0), 20) is None
    assert storage.store(record_of(15, 200, writer=1), 20) is None
    assert storage.store(record_of(16, 200, writer=1, deleted=True, value=b""), 20) is None
    assert {(record.writer, record.deleted) for record in storage.records(KEYS[0], 20)} == {
        (WRITERS[0], False),
        (WRITERS[1], True),
    }


def test_a_refused_store_does_not_shorten_a_records_life() -> None:
    """An older record with an earlier expiration must not remove the live one, as it does in hivemind's
    storage.
    """
    storage = Storage()
    assert storage.store(record_of(10, 1000), 20) is None
    assert storage.store(record_of(5, 30), 20) == "its writer has issued a later one"
    assert len(storage.records(KEYS[0], 500)) == 1
    storage.expire(500)
    assert len(storage.records(KEYS[0], 500)) == 1


def test_old_records_do_not_return_after_a_shorter_lived_successor() -> None:
    storage = Storage()
    old, young = record_of(10, 1000), record_of(20, 30)
    assert storage.store(old, 20) is None
    assert storage.store(young, 20) is None
    assert storage.records(KEYS[0], 60) == []
    assert storage.store(old, 60)
    tombstone = record_of(70, 10, deleted=True, value=b"")
    assert storage.store(tombstone, 70) is None
    assert storage.store(old, 500)
    assert storage.records(KEYS[0], 500) == []
    storage.expire(1010)
    assert storage.entry_count == 0


def test_equal_issue_times_are_resolved_the_same_way_everywhere() -> None:
    one, two = record_of(10, 100, signature=b"a"), record_of(10, 100, signature=b"b")
    for first, second in ((one, two), (two, one)):
        storage = Storage()
        storage.store(first, 20)
        storage.store(second, 20)
        assert storage.records(KEYS[0], 20) == [two]
        assert latest_by_owner([first, second]) == {two.owner: two}


@pytest.mark.parametrize(
    ("quotas", "reason"),
    [
        (Quotas(entries_per_key_max=5), "the key holds 5 entries"),
        (Quotas(entries_per_writer_max=5), "its writer has 5 entries"),
        (Quotas(entries_per_writer_and_key_max=5), "its writer has 5 entries under this key"),
        (Quotas(bytes_per_key_max=2000), "the key's entries"),
        (Quotas(bytes_per_writer_max=2000), "its writer's entries"),
        (Quotas(bytes_max=2000), "storage of 2000 bytes is full"),
    ],
)
def test_quotas_refuse_new_records_and_keep_stored_ones(quotas: Quotas, reason: str) -> None:
    storage = Storage(quotas)
    refusals = [
        storage.store(record_of(10, 100, subkey=str(number), value=bytes(100)), 20) for number in range(50)
    ]
    held = refusals.count(None)
    assert held == min(5, 2000 // record_of(10, 100, subkey="0", value=bytes(100)).size_bytes)
    assert refusals[:held] == [None] * held
    assert all(reason in (refusal or "") for refusal in refusals[held:])
    assert storage.store(record_of(11, 100, subkey="0", value=bytes(100)), 20) is None, (
        "a renewal needs no room"
    )
    grown = storage.store(record_of(12, 100, subkey="0", value=bytes(1500)), 20)
    assert (grown is None) == (
        quotas.bytes_max > 2000 < min(quotas.bytes_per_key_max, quotas.bytes_per_writer_max)
    )
    assert len(storage.records(KEYS[0], 20)) == held
    assert storage.store(record_of(200, 100, subkey="new", value=bytes(100)), 201) is None, (
        "what expired makes room"
    )


def test_a_namespace_rule_replaces_the_limit_per_writer_and_key() -> None:
    storage = Storage(Quotas(entries_per_writer_and_key_max=4), lambda key: 2 if key == KEYS[0] else None)
    for key, count in ((KEYS[0], 2), (KEYS[1], 4)):
        for writer in range(3):
            kept = [
                storage.store(record_of(10, 100, writer, key=key, subkey=str(number)), 20) is None
                for number in range(6)
            ]
            assert kept == [True] * count + [False] * (6 - count), "each writer has its own room"
    assert storage.store(record_of(200, 100, 0, subkey="later"), 201) is None, "what expired makes room"


def test_a_namespace_rule_limits_the_entries_of_a_key_and_strangers_have_half() -> None:
    known = PeerStanding()
    known.add_members("r", [PeerId(bytes([number]) * 32) for number in range(10)])
    key = Key("run.r", "progress")
    storage = Storage(standing=known, key_quota=lambda one: 8 if one == key else None)

    def stored(writer: int, at: Key) -> bool:
        record = record_of(10, 100, key=at, writer=0)
        record = replace(record, writer=PeerId(bytes([writer]) * 32), subkey="s")
        return storage.store(record, 20) is None

    assert [stored(writer, key) for writer in range(100, 106)] == [True] * 4 + [False] * 2
    assert all(stored(writer, key) for writer in range(8)), "members displace strangers"
    assert len(storage.records(key, 20)) == 8
    assert all(stored(writer, Key("run.r", "presence")) for writer in range(100, 120))


def test_a_flood_of_far_keys_leaves_room_for_near_keys() -> None:
    storage = Storage(Quotas(bytes_max=20_000, bytes_far_max=5_000))
    refusals = [
        storage.store(record_of(10, 100, subkey=str(number), value=bytes(500)), 20, far=True)
        for number in range(40)
    ]
    assert 0 < refusals.count(None) < 10
    assert "far from the key" in (refusals[-1] or "")
    near = [
        storage.store(record_of(10, 100, 1, subkey=str(number), value=bytes(500)), 20) for number in range(15)
    ]
    assert near == [None] * 15
    assert storage.far_bytes <= 5_000
    assert storage.store(record_of(11, 100, 1, subkey="1", value=bytes(500)), 20, far=True) is None, (
        "what was near stays so"
    )
    storage.expire(1000)
    assert (storage.far_bytes, storage.size_bytes) == (0, 0)


def test_frequent_renewals_do_not_grow_the_storage() -> None:
    storage = Storage()
    for number in range(5000):
        assert storage.store(record_of(number, 10**9), number) is None
    assert len(storage._due) < 200
    assert storage.entry_count == 1


@pytest.mark.parametrize("limit", ["bytes_per_key_max", "bytes_per_writer_max", "bytes_max", "bytes_far_max"])
def test_a_record_that_just_fits_the_quota_is_stored(limit: str) -> None:
    records = [record_of(10, 100, subkey=str(number), value=bytes(100)) for number in range(3)]
    storage = Storage(Quotas(**{limit: 2 * records[0].size_bytes}))  # type: ignore[arg-type]
    assert [storage.store(record, 20, far=True) is None for record in records] == [True, True, False]


def test_a_record_stored_as_near_is_not_counted_as_far() -> None:
    """Otherwise a flood of keys from afar could displace renewals of records; and a far record stays far when
    it is renewed.
    """
    storage = Storage()
    for issued, far, counted in ((1, True, True), (2, True, True), (3, False, False), (4, True, False)):
        record = record_of(issued, 100)
        assert storage.store(record, 20, far=far) is None
        assert storage.far_bytes == (record.size_bytes if counted else 0), issued


RUN = "a" * 20
RUN_KEY = Key(f"run.{RUN}", "progress")


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def written(number: int, *, key: Key = RUN_KEY, size: int = 100, ttl_s: int = 30, now_us: int = 0) -> Record:
    return Record(
        key=key,
        subkey=str(number),
        value=bytes(size),
        issued_at_us=now_us,
        expiration_us=now_us + ttl_s * 1_000_000,
        writer=peer(number),
    )


def knowing(*members: int) -> PeerStanding:
    standing = PeerStanding()
    standing.add_members(RUN, map(peer, members))
    return standing


def test_many_identities_that_fill_a_runs_key_do_not_keep_members_out() -> None:
    quotas = Quotas(entries_per_key_max=100, bytes_per_key_max=40_000)
    storage = Storage(quotas, standing=knowing(*range(60)))
    flood = [storage.store(written(1000 + number), 0) for number in range(300)]
    assert flood.count(None) == 50, "strangers share half of the entries"
    assert [storage.store(written(number), 0) for number in range(60)] == [None] * 60
    writers = {record.writer for record in storage.records(RUN_KEY, 0)}
    assert {peer(number) for number in range(60)} <= writers
    assert len(writers) == 100
    assert storage.store(written(5000), 0) is not None


def test_many_identities_that_fill_a_replica_do_not_keep_short_and_small_records_out() -> None:
    """17 identities filled 128 MiB at two replicas for 24 hours."""
    storage = Storage(Quotas(bytes_max=4 << 20))
    for number in range(100):
        key = Key("public", str(number))
        storage.store(written(1000 + number, key=key, size=60_000, ttl_s=86_400), 0)
    assert storage.size_bytes > 3 << 20
    assert [storage.store(written(number), 0) for number in range(1000)] == [None] * 1000
    assert storage.store(written(9999, key=Key("public", "large"), size=64_000, ttl_s=86_400), 0) is not None


@pytest.mark.parametrize("seed", range(30))
def test_strangers_get_half_and_members_are_never_displaced(seed: int) -> None:
    rng = random.Random(seed)
    quotas = Quotas(entries_per_key_max=20, bytes_per_key_max=12_000, bytes_max=30_000, bytes_far_max=8_000)
    storage, now_us = Storage(quotas, standing=knowing(*range(10))), 0
    keys = [RUN_KEY, Key(f"run.{RUN}", "donors"), Key("public", "x"), Key(f"run.{'b' * 20}", "progress")]
    for _ in range(400):
        now_us += rng.randrange(2_000_000)
        key, number = rng.choice(keys), rng.randrange(40)
        record = written(number, key=key, size=rng.randrange(900), ttl_s=rng.randrange(1, 90), now_us=now_us)
        storage.expire(now_us)
        before = {key: storage.records(key, now_us) for key in keys}
        refused = storage.store(record, now_us, far=rng.random() < 0.3)
        after = {key: storage.records(key, now_us) for key in keys}
        if refused:
            assert {key: sorted(held, key=repr) for key, held in before.items()} == {
                key: sorted(held, key=repr) for key, held in after.items()
            }
        gone = [
            one for key in keys for one in before[key] if one.owner not in {left.owner for left in after[key]}
        ]
        assert not any(is_known(one) for one in gone)
        strangers = [one for held in after.values() for one in held if not is_known(one)]
        assert sum(one.size_bytes for one in strangers) <= quotas.bytes_max // 2
        assert storage.size_bytes <= quotas.bytes_max
        slots = [slot for owned in storage._slots.values() for slot in owned.values()]
        assert storage.strangers_bytes == sum(slot.size_bytes for slot in slots if slot.is_stranger)
        assert storage.size_bytes == sum(slot.size_bytes for slot in slots)
        for key in keys[:2]:
            of_strangers = [one for one in after[key] if not is_known(one)]
            assert len(of_strangers) <= quotas.entries_per_key_max // 2
            assert sum(one.size_bytes for one in of_strangers) <= quotas.bytes_per_key_max // 2


def is_known(record: Record) -> bool:
    """Return whether the writer is a member of the run of the record, or of any run outside one."""
    number = int.from_bytes(record.writer.public_key, "big")
    return number < 10 and record.run in (None, RUN)
