"""Tests of which entry a read returns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swarm.core.ids import Key, PeerId
from swarm.dht.logic.reading import live, select
from swarm.dht.logic.records import Entry, Record, encode_value
from swarm.dht.logic.storage import latest_by_owner

ANNE, BERT = PeerId(b"a" * 32), PeerId(b"b" * 32)
PUBLIC, RUN = Key("public", "thing"), Key("run.abc", "presence")


def record_of(
    writer: PeerId, value: Any, issued: int, subkey: str | None = None, key: Key = PUBLIC
) -> Record:
    return Record(
        key=key,
        subkey=subkey,
        value=encode_value(value),
        issued_at_us=issued,
        expiration_us=1000,
        writer=writer,
    )


def get(*records: Record, writer: PeerId | None = None, now_us: int = 100) -> Any:
    answer = select(latest_by_owner(records), records[0].key, writer, now_us)
    if isinstance(answer, dict):
        return {subkey: entry.value for subkey, entry in answer.items()}
    return answer.value if isinstance(answer, Entry) else None


def test_the_entry_issued_last_wins() -> None:
    assert get(record_of(ANNE, "old", 1), record_of(BERT, "new", 2)) == "new"
    assert get(record_of(ANNE, "new", 3), record_of(BERT, "old", 2)) == "new"
    assert get(record_of(ANNE, "old", 1), record_of(BERT, "new", 2), writer=ANNE) == "old"
    assert get(record_of(ANNE, "old", 1), writer=BERT) is None


def test_dictionaries_merge_per_subkey() -> None:
    records = [
        record_of(ANNE, 1, 1, "x"),
        record_of(BERT, 2, 2, "x"),
        record_of(ANNE, 3, 1, "b"),
        record_of(BERT, 4, 1, "a"),
    ]
    assert get(*records) == {"a": 4, "b": 3, "x": 2}
    assert list(get(*records)) == ["a", "b", "x"]
    assert get(*records, writer=ANNE) == {"b": 3, "x": 1}


def test_a_mixed_key_is_returned_in_the_form_of_its_latest_entry() -> None:
    plain, entry = record_of(ANNE, "plain", 1), record_of(BERT, "entry", 2, "x")
    assert get(plain, entry) == {"x": "entry"}
    assert get(record_of(ANNE, "plain", 3), entry) == "plain"
    assert len(live(latest_by_owner([plain, entry]), 100)) == 2


def test_tombstones_and_expired_entries_are_not_returned() -> None:
    tomb = replace(record_of(ANNE, 0, 5), value=b"", deleted=True)
    assert get(record_of(ANNE, "dead", 1), tomb) is None
    assert get(record_of(ANNE, "dead", 1), tomb, record_of(BERT, "lives", 2)) == "lives"
    assert get(record_of(ANNE, "late", 1), now_us=1000) is None


def test_in_a_run_a_writer_has_one_entry() -> None:
    records = [record_of(who, str(who), 1, str(who), RUN) for who in (ANNE, BERT)]
    assert get(*records) == {str(ANNE): str(ANNE), str(BERT): str(BERT)}
    assert get(*records, writer=BERT) == str(BERT)
