"""Tests of self-certifying blobs: only content that the owner signed is accepted, under the one key that its
name and owner determine.
"""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.core.errors import UsageError
from swarm.core.identity import Identity
from swarm.core.ids import Key
from swarm.dht.logic.blobs import blob_key, is_blob_key
from swarm.dht.logic.namespaces import Namespaces
from swarm.dht.logic.records import RecordValidator, encode_value, record_of_blob, signed
from swarm.dht.logic.storage import Storage, latest_by_owner
from swarm.run.signed import SignedSpecification, sign, specification_key
from swarm.run.specification import RunSpecification

NOW_US = 1_800_000_000_000_000
OWNER = Identity.generate()
HOUR_US = 3_600_000_000


def specification(version: int = 1, owner: Identity = OWNER, name: str = "tiny") -> SignedSpecification:
    table = {"name": name, "target_batch_size": 64, "batch_size": 8, "task": {"name": "bytelm"}}
    return sign(RunSpecification.from_table(table, "test"), owner, version=version, created_s=0.0)


KEY = specification_key(specification().run_id)
VALIDATOR = RecordValidator(Namespaces())


def test_an_owners_blob_is_accepted_from_any_peer() -> None:
    record = record_of_blob(KEY, specification().blob, NOW_US + HOUR_US)
    assert (record.writer, record.subkey, record.issued_at_us) == (OWNER.peer_id, None, 1)
    assert VALIDATOR.refusal(record, NOW_US) is None
    assert "would live longer than 24 hours" in (
        VALIDATOR.refusal(replace(record, expiration_us=NOW_US + 25 * HOUR_US), NOW_US) or ""
    )
    assert "expired" in (VALIDATOR.refusal(replace(record, expiration_us=NOW_US), NOW_US) or "")


def test_other_content_under_a_blobs_key_is_refused() -> None:
    other = Identity.generate()
    record = record_of_blob(KEY, specification().blob, NOW_US + HOUR_US)
    body, signature = msgpack.unpackb(specification().blob)
    forged = msgpack.packb([body[:-1] + bytes([body[-1] ^ 1]), signature])
    for changed in (
        replace(record, writer=other.peer_id),
        replace(record, issued_at_us=2),
        replace(record, subkey="x"),
        replace(record, deleted=True),
        replace(record, signature=bytes(64)),
        replace(record, value=encode_value(specification(version=2).blob)),
        replace(record, value=encode_value(forged)),
        replace(record, value=encode_value("text")),
        replace(record, value=b"\xc5\x00\x01x"),
        replace(record, key=blob_key("a" * 20)),
        replace(record, key=Key("public", "specification")),
    ):
        assert VALIDATOR.refusal(changed, NOW_US), changed
    for wrong in (
        b"",
        b"garbage",
        msgpack.packb([b"x", bytes(64)]),
        msgpack.packb([b"x", b"short"]),
        specification(owner=other).blob,
    ):
        with pytest.raises(UsageError):
            record_of_blob(KEY, wrong, NOW_US + HOUR_US)
    own = signed(
        replace(record, is_blob=False, writer=other.peer_id, subkey=str(other.peer_id), issued_at_us=NOW_US),
        other,
    )
    assert "nothing but the run's signed specification" in (VALIDATOR.refusal(own, NOW_US) or "")
    assert not is_blob_key(Key("run.abc", "specification")), "an id that no run can have is its users' own"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_a_malformed_blob_is_refused(raw: bytes) -> None:
    with pytest.raises(UsageError):
        record_of_blob(KEY, raw, NOW_US + HOUR_US)
    with pytest.raises(UsageError):
        record_of_blob(KEY, msgpack.packb([raw, bytes(64)]), NOW_US + HOUR_US)


def test_the_highest_version_wins_and_storing_it_again_prolongs_its_life() -> None:
    one, two = (record_of_blob(KEY, specification(version).blob, NOW_US + HOUR_US) for version in (1, 2))
    storage = Storage()
    assert storage.store(one, NOW_US) is None
    assert storage.store(replace(one, expiration_us=NOW_US + 2 * HOUR_US), NOW_US) is None
    assert storage.records(KEY, NOW_US)[0].expiration_us == NOW_US + 2 * HOUR_US
    assert storage.store(one, NOW_US) is None
    assert storage.records(KEY, NOW_US)[0].expiration_us == NOW_US + 2 * HOUR_US, (
        "an earlier expiration does not shorten its life"
    )
    assert storage.store(two, NOW_US) is None
    assert (
        storage.store(replace(one, expiration_us=NOW_US + 3 * HOUR_US), NOW_US)
        == "its writer has issued a later one"
    )
    assert storage.records(KEY, NOW_US) == [two]
    assert storage.entry_count == 1, "a thousand members keep one copy here"
    # version two has expired; its slot is reserved until version one would have expired
    late = NOW_US + HOUR_US + 1
    assert storage.records(KEY, late) == []
    assert storage.store(replace(one, expiration_us=late + HOUR_US), late)
    assert storage.store(replace(two, expiration_us=late + HOUR_US), late) is None
    longer = replace(two, expiration_us=two.expiration_us + 1)
    for copies in ([one, two, longer], [longer, two, one]):
        assert latest_by_owner(copies) == {two.owner: longer}
