"""Runs are found by valid records only, and members renew them with few copies."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from swarm.core.errors import NetworkError, PeerError, UsageError
from swarm.core.identity import Identity
from swarm.dht.logic.companions import LISTING_KEY
from swarm.run.creation import create_run
from swarm.run.directory import RunDirectory, RunListing, choose
from swarm.run.recovery import recover
from swarm.run.signed import SignedSpecification, sign, specification_key
from swarm.run.specification import RunSpecification
from swarm.run.specification_store import SpecificationStore
from tests.run.fake_dht import NOW_S, FakeDht, FixedClock


def specification(name: str = "tiny", batch_size: int = 8) -> RunSpecification:
    return RunSpecification.from_table(
        {"name": name, "target_batch_size": 64, "batch_size": batch_size, "task": {"name": "bytelm"}}, "test"
    )


def signed(owner: Identity, *, name: str = "tiny", version: int = 1) -> SignedSpecification:
    return sign(specification(name), owner, version=version, created_s=0.0)


def test_the_only_published_run_is_found_without_a_name() -> None:
    dht, owner = FakeDht(), Identity.generate()
    asyncio.run(dht.directory(owner.peer_id).publish(signed(owner)))
    assert asyncio.run(dht.directory().find(None)) == signed(owner)
    for wanted in ("tiny", signed(owner).run_id, signed(owner).full_name):
        assert asyncio.run(dht.directory().find(wanted)) == signed(owner)


def test_an_ambiguous_or_wrong_name_is_an_error_that_lists_the_runs() -> None:
    dht, owner = FakeDht(), Identity.generate()
    for name in ("one", "two"):
        asyncio.run(dht.directory(owner.peer_id).publish(signed(owner, name=name)))
    with pytest.raises(UsageError, match=r"2 runs match: one@\w{20}, two@\w{20}"):
        asyncio.run(dht.directory().find(None))
    with pytest.raises(UsageError, match=r"has no run 'three'\. It has: one@\w{20}, two@\w{20}"):
        asyncio.run(dht.directory().find("three"))
    with pytest.raises(UsageError, match="announces no run"):
        asyncio.run(FakeDht().directory().find(None))


def test_two_runs_with_one_name_are_distinguished_by_their_ids() -> None:
    listings = [RunListing("tiny", "a" * 20), RunListing("tiny", "b" * 20)]
    with pytest.raises(UsageError, match=r"2 runs match.*Choose one with --run NAME@ID"):
        choose(listings, None)
    for by_option in (True, False):  # `swarm export tiny --from ADDRESS` names it by an argument
        with pytest.raises(UsageError, match="Name one of them, as it stands here"):
            choose(listings, "tiny", by_option=by_option)
    with pytest.raises(UsageError, match="Name one of them, as it stands here"):
        choose(listings, None, by_option=False)
    assert choose(listings, f"tiny@{'b' * 20}") == listings[1]


def test_a_listing_whose_id_does_not_fit_its_owner_and_name_is_ignored() -> None:
    dht, owner, attacker = FakeDht(), Identity.generate(), Identity.generate()
    asyncio.run(dht.directory(owner.peer_id).publish(signed(owner)))
    run_id = signed(owner).run_id
    for value in (
        {"name": "evil", "owner": owner.peer_id.to_bytes()},
        {"name": "tiny", "owner": b"short"},
        {"name": 3},
        "text",
        None,
    ):
        asyncio.run(dht.as_peer(attacker.peer_id).store(LISTING_KEY, value, ttl_s=60, subkey=run_id))
        assert asyncio.run(dht.directory().listings()) == [RunListing("tiny", run_id)]


def test_forged_copies_are_ignored_and_the_highest_version_counts() -> None:
    dht, owner, attacker = FakeDht(), Identity.generate(), Identity.generate()
    run_id = signed(owner).run_id
    key = specification_key(run_id)
    for value in (
        b"garbage",
        signed(attacker, version=9).blob,
        "text",
        signed(owner, version=1).blob,
        signed(owner, version=2).blob,
    ):
        peer = Identity.generate().peer_id
        asyncio.run(dht.as_peer(peer).store(key, value, ttl_s=60, subkey=str(peer)))
    assert asyncio.run(dht.directory().specification(run_id)).version == 2


def test_the_error_names_the_reasons_when_every_copy_is_forged() -> None:
    dht, owner = FakeDht(), Identity.generate()
    run_id = signed(owner).run_id
    with pytest.raises(PeerError, match="no peer stores it"):
        asyncio.run(dht.directory().specification(run_id))
    asyncio.run(
        dht.as_peer(owner.peer_id).store(
            specification_key(run_id), signed(Identity.generate()).blob, ttl_s=60, subkey="x"
        )
    )
    with pytest.raises(PeerError, match="it belongs to run"):
        asyncio.run(dht.directory().specification(run_id))


def test_publish_raises_when_no_peer_stores_the_records() -> None:
    dht, owner = FakeDht(), Identity.generate()
    dht.refuses = True
    with pytest.raises(NetworkError, match="no peer stored"):
        asyncio.run(dht.directory(owner.peer_id).publish(signed(owner)))


def test_creating_a_run_again_keeps_version_and_time_unless_it_changed() -> None:
    dht, owner = FakeDht(), Identity.generate()
    directory = dht.directory(owner.peer_id)
    first, new = asyncio.run(create_run(directory, specification(), owner, FixedClock()))
    assert (first.version, first.created_s, new) == (1, NOW_S, True)
    again, new = asyncio.run(create_run(directory, specification(), owner, FixedClock()))
    assert (again, new) == (first, False)
    changed, new = asyncio.run(create_run(directory, specification(batch_size=4), owner, FixedClock()))
    assert (changed.version, changed.created_s, new) == (2, NOW_S, False)


def test_a_recovered_run_is_started_again_from_its_file_by_its_new_owner(tmp_path: Path) -> None:
    dht, store = FakeDht(), SpecificationStore(tmp_path)
    owner, successor, recovery = (Identity.generate() for _ in range(3))
    named = specification().model_copy(update={"recovery_key": str(recovery.peer_id)})
    first, _ = asyncio.run(create_run(dht.directory(owner.peer_id), named, owner, FixedClock()))
    recovered = recover(first, recovery, successor)
    store.save(recovered)
    directory = RunDirectory(
        dht.as_peer(successor.peer_id),  # type: ignore[arg-type]
        clock=FixedClock(),
        store=store,
    )
    signed, new = asyncio.run(create_run(directory, specification(), successor, FixedClock()))
    assert (signed, new) == (recovered, False), "the copy on disk is newer than the first owner's in the DHT"
    changed, _ = asyncio.run(create_run(directory, specification(batch_size=4), successor, FixedClock()))
    assert (changed.run_id, changed.version) == (first.run_id, recovered.version + 1)
    with pytest.raises(UsageError, match="since it was recovered"):
        asyncio.run(create_run(directory, named, owner, FixedClock()))


@pytest.mark.parametrize("failing", [1, 3, 4])
def test_creating_a_run_tries_again_while_the_network_fails(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that is too busy to answer must not make the owner begin the run a second time."""
    monkeypatch.setattr("swarm.run.creation.RETRY_S_FIRST", 0.0)
    dht, owner = FakeDht(), Identity.generate()
    directory = dht.directory(owner.peer_id)
    first, _ = asyncio.run(create_run(directory, specification(), owner, FixedClock()))
    dht.failing_reads = failing
    if failing == 4:
        with pytest.raises(NetworkError, match="none of the 1 peers"):
            asyncio.run(create_run(directory, specification(), owner, FixedClock()))
        assert dht.stores == 2
    else:
        assert asyncio.run(create_run(directory, specification(), owner, FixedClock())) == (first, False)


def test_some_members_renew_the_specification_after_its_creator_left() -> None:
    dht, owner = FakeDht(), Identity.generate()
    for _ in range(9):
        _renew_once(dht.directory(), signed(owner), [])
    assert dht.stores == 2, "the specification and the listing, by the first who looked"
    assert asyncio.run(dht.directory().find("tiny")) == signed(owner)


def test_a_newer_version_is_followed_and_renewed_instead() -> None:
    dht, owner = FakeDht(), Identity.generate()
    asyncio.run(dht.directory(owner.peer_id).publish(signed(owner, version=2)))
    received: list[SignedSpecification] = []
    member = Identity.generate().peer_id
    _renew_once(dht.directory(member), signed(owner), received)
    assert [one.version for one in received] == [2]
    assert dht.stores == 2, "it is kept already"
    dht.entries.clear()
    _renew_once(dht.directory(member), signed(owner, version=2), received)
    assert (
        dht.entries[specification_key(signed(owner).run_id), member, None].value
        == signed(owner, version=2).blob
    )


def _renew_once(
    directory: RunDirectory, one: SignedSpecification, received: list[SignedSpecification]
) -> None:
    async def on_newer(newer: SignedSpecification) -> None:
        received.append(newer)

    async def once() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):  # it sleeps until the next renewal, minutes away
                await directory.renew(one, on_newer)

    asyncio.run(once())


def test_a_run_that_the_swarm_forgot_is_created_again_with_what_its_owner_has_changed(tmp_path: Path) -> None:
    """Regression test: only revocations stayed, so a banned peer was back when all had left once."""
    owner, revoked = Identity.generate(), str(Identity.generate().peer_id)
    banned = str(Identity.generate().peer_id)
    changed = {"revoked": (revoked,), "banned": (banned,), "message": "thank you", "ended": True}
    store = SpecificationStore(tmp_path)
    store.save(sign(specification().model_copy(update=changed), owner, version=4, created_s=1.0))
    view = FakeDht().as_peer(owner.peer_id)
    directory = RunDirectory(view, clock=FixedClock(), rng=random.Random(0), store=store)
    again, new = asyncio.run(create_run(directory, specification(), owner, FixedClock()))
    kept = specification().model_copy(update={**changed, "ended": False})
    assert (again.version, new, again.specification) == (5, True, kept)
