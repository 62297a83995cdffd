"""The recovery key of a run: a thief of the owner's key cannot keep the run."""

from __future__ import annotations

import random
from dataclasses import replace

import msgpack
import pytest

from swarm.core.errors import PeerError, UsageError
from swarm.core.identity import Identity
from swarm.core.ids import PeerId
from swarm.dht.logic.blobs import (
    VERSION_MAX,
    VERSION_STEP_MAX,
    Handover,
    handover_message,
    version_text,
)
from swarm.dht.logic.namespaces import Namespaces
from swarm.dht.logic.records import RecordValidator, record_of_blob
from swarm.dht.logic.storage import Storage
from swarm.run.changes import Change, differences, sign_change
from swarm.run.recovery import recover
from swarm.run.signed import SignedSpecification, newest, run_id_of, sign, specification_key, verified
from swarm.run.specification import RunSpecification

OWNER, RECOVERY, NEXT, THIEF = (Identity.generate() for _ in range(4))
TABLE = {
    "name": "tiny",
    "target_batch_size": 64,
    "batch_size": 8,
    "task": {"name": "bytelm"},
    "recovery_key": str(RECOVERY.peer_id),
}
SPECIFICATION = RunSpecification.from_table(TABLE, "test")
FIRST = sign(SPECIFICATION, OWNER, version=1, created_s=5.0)
NOW_US = 1_800_000_000_000_000


def stolen(version: int, **changes: object) -> SignedSpecification:
    """Return what a thief of the owner's key signs."""
    return sign(SPECIFICATION.model_copy(update=changes), OWNER, version=version, created_s=5.0)


def test_the_run_id_depends_on_the_recovery_key() -> None:
    ids = {
        run_id_of(OWNER.peer_id, "tiny"),
        run_id_of(OWNER.peer_id, "tiny", RECOVERY.peer_id),
        run_id_of(OWNER.peer_id, "tiny", THIEF.peer_id),
    }
    assert len(ids) == 3
    without = sign(SPECIFICATION.model_copy(update={"recovery_key": None}), OWNER, version=2, created_s=5.0)
    with pytest.raises(PeerError, match=f"not to {FIRST.run_id}"):
        verified(without.blob, FIRST.run_id)


@pytest.mark.parametrize("version", [2, 1001, VERSION_MAX])
def test_the_new_owner_wins_over_every_version_that_a_thief_signs(version: int) -> None:
    theirs = stolen(version, ended=True, banned=(str(NEXT.peer_id),))
    ours = recover(theirs, RECOVERY, NEXT)
    assert (ours.run_id, ours.owner, ours.founder) == (FIRST.run_id, NEXT.peer_id, OWNER.peer_id)
    assert verified(ours.blob, FIRST.run_id) == ours
    assert ours.specification == SPECIFICATION
    for held in (FIRST, theirs):
        assert newest([ours, theirs], held=held) == ours
    assert newest([stolen(VERSION_MAX, ended=True)], held=ours) == ours
    assert version_text(ours.version) == "1 of owner 2"
    assert f"the recovery key made {NEXT.peer_id} its owner" in differences(theirs, ours)
    changed = sign_change(ours, Change(paused=True), NEXT)
    assert verified(changed.blob, FIRST.run_id).specification.paused
    with pytest.raises(UsageError, match="only its owner"):
        sign_change(ours, Change(paused=True), OWNER)


def test_a_run_is_recovered_again_after_its_second_owner_lost_the_key() -> None:
    second = recover(FIRST, RECOVERY, NEXT)
    theirs = sign(SPECIFICATION, NEXT, version=second.version + 7, created_s=5.0, handover=second.handover)
    third = recover(theirs, RECOVERY, THIEF)
    assert verified(third.blob, FIRST.run_id) == third
    assert newest([theirs, second, third, FIRST]) == third
    assert version_text(third.version) == "1 of owner 3"


def test_only_the_runs_recovery_key_recovers_it() -> None:
    plain = sign(SPECIFICATION.model_copy(update={"recovery_key": None}), OWNER, version=1, created_s=5.0)
    for known, recovery, owner, sentence in [
        (plain, RECOVERY, NEXT, "has no recovery key"),
        (FIRST, THIEF, NEXT, f"is {RECOVERY.peer_id}"),
        (FIRST, RECOVERY, RECOVERY, "stay offline"),
        (FIRST, RECOVERY, OWNER, "owned tiny@.* before"),
    ]:
        with pytest.raises(UsageError, match=sentence):
            recover(known, recovery, owner)


def signed_with(handover: Handover, version: int, owner: Identity) -> bytes:
    return sign(SPECIFICATION, owner, version=version, created_s=5.0, handover=handover).blob


def handover(
    signer: Identity, *, owner: PeerId, after: int = VERSION_MAX, run_id: str = FIRST.run_id
) -> Handover:
    return Handover(OWNER.peer_id, owner, after, signer.sign(handover_message(run_id, owner, after)))


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (signed_with(handover(OWNER, owner=THIEF.peer_id), VERSION_MAX + 1, THIEF), "recovery key"),
        (signed_with(handover(THIEF, owner=THIEF.peer_id), VERSION_MAX + 1, THIEF), "recovery key"),
        (
            signed_with(handover(RECOVERY, owner=NEXT.peer_id, run_id="a" * 20), VERSION_MAX + 1, NEXT),
            "recovery key",
        ),
        (signed_with(handover(RECOVERY, owner=NEXT.peer_id), VERSION_MAX + 1, THIEF), "not its owner's"),
        (signed_with(handover(RECOVERY, owner=NEXT.peer_id), 5, NEXT), "version"),
        (signed_with(handover(RECOVERY, owner=NEXT.peer_id), 2 * VERSION_MAX + 1, NEXT), "version"),
        (signed_with(handover(RECOVERY, owner=NEXT.peer_id, after=7), 8, NEXT), "handover"),
        (
            signed_with(
                replace(handover(RECOVERY, owner=NEXT.peer_id), owner=THIEF.peer_id), VERSION_MAX + 1, THIEF
            ),
            "recovery key",
        ),
        (stolen(VERSION_MAX + 1).blob, "version"),
    ],
)
def test_a_forged_handover_is_refused_by_members_and_replicas(blob: bytes, reason: str) -> None:
    with pytest.raises(PeerError, match=reason):
        verified(blob, FIRST.run_id)
    key = specification_key(FIRST.run_id)
    try:
        refusal = RecordValidator(Namespaces()).refusal(record_of_blob(key, blob, NOW_US + 1_000_000), NOW_US)
    except UsageError as error:
        refusal = str(error)
    assert refusal


@pytest.mark.parametrize("value", [[], [b"", 1], "x", 5, [b"x" * 38, VERSION_MAX, b""], [None, None, None]])
def test_a_malformed_handover_is_refused(value: object) -> None:
    body = msgpack.packb({**msgpack.unpackb(msgpack.unpackb(FIRST.blob)[0]), "handover": value})
    blob = msgpack.packb([body, OWNER.sign(b"swarm run specification 1\0" + body)])
    with pytest.raises(PeerError):
        verified(blob, FIRST.run_id)


def test_a_specification_version_cannot_jump_to_the_last_one_in_one_step() -> None:
    far = stolen(VERSION_MAX, ended=True)
    assert newest([far], held=FIRST) == FIRST
    assert newest([far, FIRST]) == FIRST, "a newcomer takes what is reached from the lowest copy"
    near = stolen(1 + VERSION_STEP_MAX)
    assert newest([near], held=FIRST) == near
    assert newest([stolen(2 + VERSION_STEP_MAX)], held=FIRST) == FIRST
    assert newest([stolen(2), stolen(2 + VERSION_STEP_MAX)], held=FIRST) == stolen(2 + VERSION_STEP_MAX)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_does_not_depend_on_the_order_of_the_copies(seed: int) -> None:
    rng = random.Random(seed)
    versions = [rng.choice((1, 2, 900, 1500, 2400, VERSION_MAX)) for _ in range(6)]
    copies = [stolen(version, paused=rng.random() < 0.5) for version in versions]
    chosen = newest(copies)
    shuffled = rng.sample(copies, len(copies))
    assert newest(shuffled) == chosen
    reached = {min(versions)}
    for version in sorted(versions):
        if version - max(reached) <= VERSION_STEP_MAX:
            reached.add(version)
    assert chosen is not None
    assert chosen.version == max(reached)


def test_a_replica_keeps_the_version_when_a_thief_jumps_and_takes_the_new_owners() -> None:
    storage, key, validator = Storage(), specification_key(FIRST.run_id), RecordValidator(Namespaces())
    ours = recover(stolen(VERSION_MAX), RECOVERY, NEXT)
    for signed, refusal in [
        (FIRST, None),
        (stolen(VERSION_MAX), "versions above"),
        (stolen(2), None),
        (ours, None),
    ]:
        record = record_of_blob(key, signed.blob, NOW_US + 3_600_000_000)
        assert validator.refusal(record, NOW_US) is None
        answer = storage.store(record, NOW_US)
        assert (answer is None) if refusal is None else (refusal in (answer or ""))
    held = {record.issued_at_us: record.writer for record in storage.records(key, NOW_US)}
    assert held == {2: OWNER.peer_id, ours.version: NEXT.peer_id}
