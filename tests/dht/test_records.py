"""Tests of records: which fields are signed, which records are refused and why, and how malicious values are
decoded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.errors import UsageError
from swarm.core.identity import verify
from swarm.core.ids import Key
from swarm.dht.logic import records
from swarm.dht.logic.namespaces import Namespaces
from swarm.dht.logic.records import (
    FUTURE_MAX_US,
    TTL_MAX_US,
    Entry,
    Record,
    RecordValidator,
    decode_value,
    encode_value,
    signed,
    signing_bytes,
)
from swarm.dht.logic.rules import NamespaceRules
from swarm.testing.identities import SeededIdentity

NOW_US = 1_800_000_000_000_000
ANNE, BERT = SeededIdentity("anne"), SeededIdentity("bert")


def record_of(writer: SeededIdentity = ANNE, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "key": Key("public", "thing"),
        "subkey": None,
        "value": encode_value({"a": 1}),
        "issued_at_us": NOW_US,
        "expiration_us": NOW_US + 60_000_000,
        "writer": writer.peer_id,
    }
    return signed(Record(**{**fields, **changes}), writer)


def refusal(record: Record, now_us: int = NOW_US) -> str | None:
    return RecordValidator().refusal(record, now_us)


def test_valid_records_are_accepted() -> None:
    assert refusal(record_of()) is None
    assert refusal(record_of(subkey="sub")) is None
    assert refusal(record_of(subkey="")) is None
    assert refusal(record_of(value=b"", deleted=True)) is None
    assert refusal(record_of(key=Key("run.abc", "presence"), subkey=str(ANNE.peer_id))) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"key": Key("public", "thinh")},
        {"key": Key("publi", "cthing")},
        {"subkey": ""},
        {"subkey": "x"},
        {"value": encode_value({"a": 2})},
        {"issued_at_us": NOW_US - 1},
        {"expiration_us": NOW_US + 60_000_001},
        {"writer": BERT.peer_id},
        {"value": b"", "deleted": True},
        {"signature": bytes(64)},
        {"signature": b""},
        {"signature": ANNE.sign(b"something else")},
    ],
)
def test_every_field_is_signed(changes: dict[str, Any]) -> None:
    changed = replace(record_of(), **changes)
    assert refusal(changed)
    assert "signature" in changes or signing_bytes(changed) != signing_bytes(record_of())


def test_a_record_of_one_run_is_invalid_in_another() -> None:
    subkey = str(ANNE.peer_id)
    record = record_of(key=Key("run.abc", "presence"), subkey=subkey)
    assert refusal(replace(record, key=Key("run.abd", "presence"))) == "its signature is not its writer's"
    assert refusal(replace(record, key=Key("run.abc", "progress"))) == "its signature is not its writer's"


def test_a_record_signature_is_valid_for_records_only() -> None:
    """Check the domain separation: a record's signature cannot be mistaken for, or taken from, any other
    signature of the identity.
    """
    assert signing_bytes(record_of()).startswith(b"swarm/dht/record/1\0")
    record = record_of()
    bare = signing_bytes(record)[len(b"swarm/dht/record/1\0") :]
    assert refusal(replace(record, signature=ANNE.sign(bare)))


def test_moving_bytes_between_fields_invalidates_the_signature() -> None:
    one = record_of(key=Key("public", "ab"), subkey="c")
    two = replace(one, key=Key("public", "a"), subkey="bc")
    assert signing_bytes(one) != signing_bytes(two)
    assert refusal(two)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expiration_us": NOW_US}, "expires before"),
        ({"issued_at_us": -5, "expiration_us": NOW_US}, "expires before"),
        ({"expiration_us": NOW_US + TTL_MAX_US + 1}, "24 hours"),
        (
            {"issued_at_us": NOW_US + FUTURE_MAX_US + 1, "expiration_us": NOW_US + FUTURE_MAX_US + 10},
            "in the future",
        ),
        ({"issued_at_us": NOW_US - 100, "expiration_us": NOW_US - 1}, "expired"),
        ({"value": b"x" * (64 * 1024 + 1)}, "bytes"),
        ({"subkey": "s" * 257}, "subkey"),
        ({"value": encode_value(1), "deleted": True}, "tombstone"),
        ({"value": b""}, "not a DHT value"),
        ({"value": b"\x81"}, "not a DHT value"),
        ({"key": Key("run.", "thing"), "subkey": str(ANNE.peer_id)}, "names no run"),
        ({"key": Key("run.abc", "thing")}, "its writer's PeerID"),
        ({"key": Key("run.abc", "thing"), "subkey": str(BERT.peer_id)}, "its writer's PeerID"),
    ],
)
def test_each_invalid_record_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in (refusal(record_of(**changes)) or "")


def test_a_record_from_the_future_is_refused_because_of_a_wrong_clock() -> None:
    record = record_of(issued_at_us=NOW_US + 400_000_000, expiration_us=NOW_US + 500_000_000)
    assert refusal(record) == "it was issued 400 s in the future: one of the two clocks is wrong"


def test_the_signature_cache_is_bounded_and_correct(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def counted(*arguments: Any) -> bool:
        calls.append(arguments)
        return verify(*arguments)

    monkeypatch.setattr(records, "verify", counted)
    monkeypatch.setattr(records, "VERIFIED_MAX", 3)
    validator = RecordValidator()
    good, forged = record_of(), replace(record_of(), signature=bytes(64))
    for _ in range(3):
        assert validator.refusal(good, NOW_US) is None
        assert validator.refusal(forged, NOW_US)
    assert len(calls) == 2
    for number in range(10):
        assert validator.refusal(record_of(value=encode_value(number)), NOW_US) is None
    assert len(validator._verified) == 3


def test_an_accepted_record_is_judged_again_only_when_the_rules_have_changed() -> None:
    namespaces, judged = Namespaces(), []

    class Counted:
        changes = property(lambda self: namespaces.changes)

        def refusal(self, record: Record) -> str | None:
            judged.append(record)
            return namespaces.refusal(record)

    validator, record = RecordValidator(Counted()), record_of()
    for _ in range(3):
        assert validator.refusal(record, NOW_US) is None
    assert len(judged) == 1
    assert validator.refusal(record, NOW_US + 61_000_000) == "it expired 1 s ago"  # time is always checked
    namespaces.register("public", NamespaceRules(writers=frozenset()))
    for _ in range(2):
        assert "may write" in (validator.refusal(record, NOW_US) or "")  # refusals are not remembered
    assert len(judged) == 3


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda part: (
        st.lists(part, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), part, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(values)
def test_values_survive_encoding_and_decoding(value: Any) -> None:
    assert decode_value(encode_value(value)) == value


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_decoding_handles_any_bytes(raw: bytes) -> None:
    try:
        value = decode_value(raw)
    except UsageError:
        return
    # what was decoded can be encoded, NaN included
    assert repr(decode_value(encode_value(value))) == repr(value)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "raw",
    [
        b"\x91" * 60_000 + b"\xc0",  # lists in lists in lists
        b"\x91" * 500 + b"\xc0",
        b"\x81" * 100 + b"\xc0",
        b"\x81\x90\x01",  # a list as a key
        b"\x81\x80\x01",  # a map as a key
        b"\xdd\xff\xff\xff\xff",  # a list of 4 billion, cut off
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\xd4\x05\x00",  # an extension
        b"\xa1\xff",  # not UTF-8
        b"\x01\x02",  # something after the value
        b"\xc1",
    ],
)
def test_malicious_values_are_refused(raw: bytes) -> None:
    with pytest.raises(UsageError):
        decode_value(raw)
    assert refusal(record_of(value=raw))


@pytest.mark.parametrize(
    "value", [object(), {1, 2}, 2**64, nested(40), bytes(64 * 1024), {(1, 2): 3}, "\ud800"]
)
def test_an_unsupported_value_is_refused_with_a_reason(value: Any) -> None:
    with pytest.raises(UsageError, match="DHT value"):
        encode_value(value)
    assert encode_value(nested(31))


def test_the_value_of_a_forged_record_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    forged = replace(record_of(value=encode_value([1, 2, 3])), signature=bytes(64))
    decoded: list[bytes] = []
    monkeypatch.setattr(records, "decode_value", decoded.append)
    assert refusal(forged) == records.FORGED
    assert not decoded


def test_a_cyclic_value_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(UsageError):
        encode_value(cycle)


def test_the_times_of_an_entry_are_in_seconds() -> None:
    entry = Entry.of(record_of(subkey="s", issued_at_us=NOW_US + 500_000))
    assert entry == Entry(
        value={"a": 1},
        subkey="s",
        writer=ANNE.peer_id,
        issued_at=NOW_US / 1e6 + 0.5,
        expiration=NOW_US / 1e6 + 60,
    )
    assert msgpack.unpackb(encode_value(entry.value)) == entry.value
