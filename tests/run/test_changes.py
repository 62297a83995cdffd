"""Changes of a run: only its owner may sign them, and members gossip them."""

from __future__ import annotations

import random

import pytest

from swarm.core.errors import PeerError, UsageError
from swarm.core.identity import Identity
from swarm.run.changes import (
    CHANGE,
    FANOUT,
    Change,
    RunFollower,
    differences,
    restart_needed,
    send_version,
    sign_change,
)
from swarm.run.signed import SignedSpecification, sign, verified
from swarm.run.specification import RunSpecification
from swarm.testing.network import SimulatedNetwork, SimulatedPeer
from swarm.testing.virtual_loop import run_virtual
from swarm.wire import run_pb2

OWNER = Identity.generate()
TABLE = {"name": "tiny", "target_batch_size": 64, "batch_size": 8, "task": {"name": "bytelm"}}
FIRST = sign(RunSpecification.from_table(TABLE, "test"), OWNER, version=1, created_s=5.0)
PEER = str(Identity.generate().peer_id)


def test_each_change_signs_the_next_version_with_that_difference() -> None:
    second = sign_change(FIRST, Change(target_batch_size=128, ban=(PEER,)), OWNER)
    assert (second.version, second.created_s, second.run_id) == (2, 5.0, FIRST.run_id)
    assert verified(second.blob, FIRST.run_id).specification.banned == (PEER,)
    assert [str(peer) for peer in second.specification.banned_peers] == [PEER]
    assert differences(FIRST, second) == [
        "an epoch is 128 samples now, not 64",
        "1 peer is banned",
    ]
    assert not restart_needed(FIRST.specification, second.specification)
    third = sign_change(second, Change(paused=True, unban=(PEER,)), OWNER)
    assert differences(second, third) == [
        "training is paused",
        "1 peer is let in again",
    ]
    assert sign_change(third, Change(ended=True), OWNER).specification.ended
    other = FIRST.specification.model_copy(update={"batch_size": 9})
    assert restart_needed(FIRST.specification, other)


def test_invalid_changes_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="only its owner can change a run"):
        sign_change(FIRST, Change(paused=True), Identity.generate())
    with pytest.raises(UsageError, match="is the owner of tiny@"):
        sign_change(FIRST, Change(revoke=(str(OWNER.peer_id),)), OWNER)
    with pytest.raises(
        UsageError, match=r"'it' is not a PeerID: one looks like 12D3KooW… and has 52 characters$"
    ):
        sign_change(FIRST, Change(revoke=("it",)), OWNER)
    with pytest.raises(UsageError, match="has these settings already"):
        sign_change(FIRST, Change(paused=False), OWNER)
    with pytest.raises(UsageError, match="'somebody' is not a PeerID"):
        sign_change(FIRST, Change(ban=("somebody",)), OWNER)


class FakeDirectory:
    def __init__(self) -> None:
        self.saved: list[int] = []

    async def save(self, signed: SignedSpecification) -> None:
        self.saved.append(signed.version)


def member(
    network: SimulatedNetwork, peer: SimulatedPeer, known: list[SimulatedPeer], received: list[int]
) -> RunFollower:
    directory = FakeDirectory()
    follower = RunFollower(
        FIRST,
        caller=peer.caller,
        directory=directory,  # type: ignore[arg-type]
        members=lambda: [one.contact for one in known],
        on_newer=lambda newer: received.append(newer.version),
        rng=random.Random(peer.index),
    )
    peer.handlers.unary(CHANGE, follower.on_change)
    return follower


def test_a_change_reaches_a_thousand_members_in_seconds_with_eight_calls_each() -> None:
    async def main() -> None:
        network = SimulatedNetwork(3)
        peers, rng = [network.peer() for _ in range(1001)], random.Random(4)
        received: list[list[int]] = [[] for _ in peers]
        followers = [member(network, peer, rng.sample(peers, 32), received[peer.index]) for peer in peers[1:]]
        second = sign_change(FIRST, Change(paused=True), OWNER)
        following = await send_version(peers[0].caller, second, [peer.contact for peer in peers[1:5]])
        assert set(following.values()) == {2}
        assert network.rng is not None
        took_s = network.peers[peers[0].peer_id].clock.monotonic_s()
        assert sum(follower.signed.version == 2 for follower in followers) >= 995, (
            "nearly all: the others find it in the DHT"
        )
        assert all(len(one) <= 1 for one in received), "each receives it once"
        assert max(peer.messages_sent for peer in peers[1:]) <= FANOUT + 40, "replies included"
        assert took_s < 3.0
        assert not network.errors
        await network.close()

    run_virtual(main(), limit_s=60)


def test_only_a_newer_version_that_the_owner_signed_is_accepted() -> None:
    async def main() -> None:
        network = SimulatedNetwork(1)
        one, two = network.peer(), network.peer()
        received: list[int] = []
        follower = member(network, two, [], received)
        attacker = Identity.generate()
        forged = sign(
            RunSpecification.from_table({**TABLE, "paused": True}, "test"), attacker, version=9, created_s=5.0
        )
        second = sign_change(FIRST, Change(paused=True), OWNER)
        for blob, reason in [
            (forged.blob, "belongs to run"),
            (b"garbage", "cannot be decoded"),
            (second.blob[:-1] + bytes([second.blob[-1] ^ 1]), "not its owner's"),
        ]:
            with pytest.raises(PeerError, match=reason):
                await one.caller.call(
                    two.contact,
                    CHANGE,
                    run_pb2.ChangeRequest(run=FIRST.run_id, specification=blob),
                    timeout_s=5,
                )
        assert received == []
        assert await send_version(one.caller, second, [two.contact]) == {two.peer_id: 2}
        assert await send_version(one.caller, FIRST, [two.contact]) == {two.peer_id: 2}, (
            "an older one changes nothing"
        )
        assert received == [2]
        assert follower.signed == second
        with pytest.raises(PeerError, match="does not take part"):
            await one.caller.call(two.contact, CHANGE, run_pb2.ChangeRequest(run="x" * 20), timeout_s=5)
        await network.close()

    run_virtual(main(), limit_s=60)
