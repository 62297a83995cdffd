"""Tests of the read cache, of summaries that holders exchange, and of candidates for rejoining, against plain
models.
"""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.ids import Address, Contact, Key, PeerId
from swarm.dht.logic.cache import CachedAnswer, ReadCache
from swarm.dht.logic.records import Record
from swarm.dht.logic.rejoin import BOOTSTRAP_MAX, LOST_MAX, PAUSE_MAX_S, RejoinCandidates
from swarm.dht.logic.storage import Storage, latest_by_owner
from swarm.dht.logic.summary import ENTRY_BYTES, missing_entries, summary

KEY = Key("public", "thing")


def contact_of(number: int) -> Contact:
    return Contact(PeerId(number.to_bytes(32, "big")), (Address("127.0.0.1", 4000),))


def record_of(writer: int, issued: int, subkey: str | None = None, size: int = 0, **changes: bool) -> Record:
    return Record(
        key=KEY,
        subkey=subkey,
        value=bytes(size),
        issued_at_us=issued,
        expiration_us=issued + 1000,
        writer=contact_of(writer).peer_id,
        signature=bytes(64),
        **changes,
    )


def answer_of(taken_s: float, size: int) -> CachedAnswer:
    return CachedAnswer(taken_s, int(taken_s * 1e6), 0, latest_by_owner([record_of(1, 0, size=size)]))


def is_known(cache: ReadCache, key: Key, now_s: float = 9.0, age_s: float = 9.0) -> bool:
    return cache.get(key, now_s, int(now_s * 1e6), age_s) is not None


def test_the_read_cache_is_bounded_and_honours_the_readers_age_limit() -> None:
    cache = ReadCache(keys_max=3, bytes_max=10_000)
    keys = [Key("public", str(number)) for number in range(6)]
    for number, key in enumerate(keys):
        cache.put(key, answer_of(float(number), 100))
    assert len(cache) == 3
    assert not is_known(cache, keys[0])
    assert is_known(cache, keys[5], 15.0, 10.0)
    assert not is_known(cache, keys[5], 15.1, 10.0)
    assert cache.get(keys[5], 6.0, 3_600_000_000, 10.0) is None, (
        "a machine that was suspended for an hour: one of its clocks stood still"
    )
    cache.put(keys[1], answer_of(9.0, 9000))
    assert is_known(cache, keys[1])
    assert len(cache) < 3
    assert cache.size_bytes <= 10_000
    cache.put(keys[2], answer_of(9.0, 20_000))
    assert not is_known(cache, keys[2]), "larger than all of it"
    for key in keys:
        cache.drop(key)
    assert (len(cache), cache.size_bytes) == (0, 0)


_RECORDS = st.lists(
    st.builds(record_of, st.integers(1, 4), st.integers(0, 5), st.sampled_from([None, "", "x"])), max_size=20
)


@settings(max_examples=200, deadline=None)
@given(here=_RECORDS, there=_RECORDS)
def test_two_holders_agree_after_comparing_in_both_directions(
    here: list[Record], there: list[Record]
) -> None:
    stores = [Storage(), Storage()]
    for storage, records in zip(stores, (here, there), strict=True):
        for record in records:
            storage.store(record, 10)
    for giver, taker in (stores, stores[::-1]):
        offered = giver.records(KEY, 10)
        numbers = missing_entries(KEY, summary(KEY, offered), taker.versions(KEY))
        sent = [offered[number] for number in numbers]
        held = {record.owner: record.issued_at_us for record in taker.records(KEY, 10)}
        assert sent == [record for record in offered if held.get(record.owner, -1) < record.issued_at_us], (
            "what it lacks, no more"
        )
        for record in sent:
            assert taker.store(record, 10) is None
    assert (
        set(stores[0].records(KEY, 10))
        == set(stores[1].records(KEY, 10))
        == set(latest_by_owner([*here, *there]).values())
    )


def test_a_reserved_slot_requests_no_older_record() -> None:
    storage = Storage()
    old = record_of(1, 0)
    storage.store(old, 1)
    gone = Record(
        key=KEY,
        subkey=None,
        value=b"",
        issued_at_us=5,
        expiration_us=50,
        writer=old.writer,
        deleted=True,
        signature=bytes(64),
    )
    storage.store(gone, 6)
    assert storage.records(KEY, 100) == []
    assert missing_entries(KEY, summary(KEY, [old]), storage.versions(KEY)) == []


@given(st.binary(max_size=100))
def test_an_incomplete_last_entry_of_a_summary_is_ignored(raw: bytes) -> None:
    assert len(missing_entries(KEY, raw, {})) == len(raw) // ENTRY_BYTES


def test_rejoin_candidates_are_bounded_and_called_less_and_less_often() -> None:
    candidates = RejoinCandidates(random.Random(1))
    table: set[PeerId] = set()
    candidates.add_bootstrap([contact_of(number) for number in range(1, BOOTSTRAP_MAX + 10)], 0.0)
    for number in range(1000, 3000):
        candidates.add_lost(contact_of(number), 0.0)
    assert len(candidates.contacts()) == BOOTSTRAP_MAX + LOST_MAX
    assert len(candidates.due(60.0, table, 1000)) == BOOTSTRAP_MAX + LOST_MAX
    calls: dict[PeerId, list[float]] = {}
    now_s = 0.0
    while now_s < 3 * 3600.0:
        now_s += 15.0
        for contact in candidates.due(now_s, table, 1000):
            calls.setdefault(contact.peer_id, []).append(now_s)
            candidates.on_called(contact.peer_id, now_s)
    assert all(20 <= len(times) <= 60 for times in calls.values())
    assert all(
        later - sooner <= 1.25 * PAUSE_MAX_S + 15
        for times in calls.values()
        for sooner, later in itertools.pairwise(times)
    )
    back = contact_of(1)
    table.add(back.peer_id)
    candidates.retry_all_now(now_s)
    due = candidates.due(now_s, table, 1000)
    assert back not in due, "the table knows it"
    candidates.due(now_s + 7 * 3600.0, table, 1000)
    assert len(candidates.contacts()) == BOOTSTRAP_MAX, (
        "lost peers are forgotten in the end, bootstrap peers never"
    )
