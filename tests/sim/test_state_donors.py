"""A donor of a state: what it keeps for downloads, and which requests it refuses."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch

from averaging.optim.exchange import CHUNKS as CHUNKS_METHOD
from averaging.optim.exchange import OPEN
from averaging.optim.state.donor import LEASE_IDLE_S, LEASE_S, LEASES_MAX, RECORD_RENEW_S, Donor
from averaging.optim.state.download import OPEN_WAIT_S
from averaging.optim.state.snapshot import pieces_digest
from averaging.optim.state.training_state import TrainingState
from swarm.core.errors import DeadlineExceeded, NotEnoughPeers, PeerError
from swarm.core.ids import Contact, Key, PeerId
from swarm.testing.network import SimulatedNetwork, SimulatedPeer
from swarm.testing.simulated_node import SimulatedNode
from swarm.testing.virtual_loop import VirtualLoop
from swarm.wire import state_pb2
from tests.sim.donors import RUN, donor, joining, play, state_of


def _other(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def test_a_donor_that_trains_keeps_the_leased_state_and_limits_its_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("averaging.optim.state.donor.SNAPSHOTS_MAX", 1)
    monkeypatch.setattr("averaging.optim.state.donor.LEASES_MAX", 2)

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        state = state_of(1)
        digest = state.snapshot().digest
        made = donor(peers[0], state)

        async def update() -> None:
            await asyncio.sleep(0.8)
            with state.lock, torch.no_grad():
                state.parameters[0].add_(1.0)
                state.mark_changed(6)
            request = state_pb2.OpenRequest(run=RUN)
            with pytest.raises(PeerError, match="earlier epochs"):
                await made.on_open(_other(1), request)

        async with asyncio.TaskGroup() as group:
            group.create_task(update())
            task = group.create_task(joining(joiner, state_of(2)).fetch([peers[0].contact], 60))
        assert task.result().digest == digest, "the snapshot is of the moment when the lease was opened"
        reply = await made.on_open(joiner.peer_id, state_pb2.OpenRequest(run=RUN))
        assert reply.epoch == 6
        await made.on_open(_other(1), state_pb2.OpenRequest(run=RUN))
        with pytest.raises(PeerError, match="busy"):
            await made.on_open(_other(2), state_pb2.OpenRequest(run=RUN))
        await asyncio.sleep(LEASE_IDLE_S + 1)
        assert (await made.on_open(joiner.peer_id, state_pb2.OpenRequest(run=RUN))).epoch == 6, (
            "idle leases make room"
        )
        with pytest.raises(PeerError, match="epoch 6 only"):
            await made.on_open(joiner.peer_id, state_pb2.OpenRequest(run=RUN, epoch_min=7))

    play(scenario, donors=1)


def test_a_peer_has_one_lease_and_a_new_one_ends_its_last() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        made = donor(peers[0], state_of(1))
        for _ in range(5):
            await made.on_open(joiner.peer_id, state_pb2.OpenRequest(run=RUN))
        assert made.downloads == 1
        for number in range(1, LEASES_MAX):
            await made.on_open(_other(number), state_pb2.OpenRequest(run=RUN, reserve=True))
        with pytest.raises(PeerError, match="busy"):
            await made.on_open(_other(LEASES_MAX), state_pb2.OpenRequest(run=RUN))
        assert (await made.on_open(_other(1), state_pb2.OpenRequest(run=RUN))).total_bytes, (
            "its place is kept"
        )

    play(scenario, donors=1)


@pytest.mark.parametrize("again", [False, True], ids=["silent", "repeating"])
def test_strangers_that_fetch_little_lose_their_places_to_those_who_ask(again: bool) -> None:
    """Four identities fetch one chunk every 10 s, the same one over and over, or open again and again."""

    async def attack(peer: SimulatedPeer, victim: SimulatedPeer) -> None:
        while True:
            lease = state_pb2.OpenRequest(run=RUN)
            try:
                reply = await peer.caller.call(victim.contact, OPEN, lease, timeout_s=5)
                async with peer.caller.open_stream(victim.contact, CHUNKS_METHOD, timeout_s=None) as stream:
                    while True:
                        request = state_pb2.ChunksRequest(run=RUN, lease=reply.lease, indices=[0])
                        await stream.send(request.SerializeToString())
                        assert await stream.receive()
                        await asyncio.sleep(10)
                        if again:
                            break
            except PeerError:
                await asyncio.sleep(4)

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        made, began_s = donor(peers[0], state_of(1)), joiner.clock.monotonic_s()
        attackers = [network.peer() for _ in range(LEASES_MAX)]
        async with asyncio.TaskGroup() as group:
            attacks = [group.create_task(attack(one, peers[0])) for one in attackers]
            await asyncio.sleep(5)
            for _ in range(20):
                with contextlib.suppress(PeerError):
                    request = state_pb2.OpenRequest(run=RUN)
                    await joiner.caller.call(peers[0].contact, OPEN, request, timeout_s=5)
                    break
                await asyncio.sleep(3)
            for task in attacks:
                task.cancel()
        assert made.downloads
        assert joiner.clock.monotonic_s() - began_s < LEASE_S + 15.0

    play(scenario, donors=1)


def test_a_member_takes_the_place_of_a_stranger() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        node = SimulatedNode(lambda: peers[0].contact, peers[0].clock, None)
        made = Donor(node, RUN, state_of(1))
        made.start()
        await asyncio.sleep(0.1)
        reserve = state_pb2.OpenRequest(run=RUN, reserve=True)
        members = [_other(number) for number in range(LEASES_MAX + 1)]
        node.standing.add_members(RUN, members)
        for number in range(LEASES_MAX):
            await made.on_open(_other(100 + number), reserve)
        with pytest.raises(PeerError, match="busy"):
            await made.on_open(_other(200), reserve)
        for member in members[:LEASES_MAX]:
            await made.on_open(member, reserve)
        with pytest.raises(PeerError, match="busy"):
            await made.on_open(members[LEASES_MAX], reserve)

    play(scenario, donors=1)


def test_a_reserved_place_costs_no_copy_and_serves_nothing() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        made = donor(peers[0], state_of(1))
        reply = await made.on_open(joiner.peer_id, state_pb2.OpenRequest(run=RUN, reserve=True))
        assert not made.leased_views()
        request = state_pb2.ChunksRequest(run=RUN, lease=reply.lease, indices=[0])
        async with joiner.caller.open_stream(peers[0].contact, CHUNKS_METHOD, timeout_s=5.0) as stream:
            await stream.send(request.SerializeToString())
            with pytest.raises(PeerError, match="lease is over"):
                await stream.receive()

    play(scenario, donors=1)


def test_the_leases_of_refused_offers_are_closed() -> None:
    """Each refused offer once kept its lease for 30 s, so that a donor was full after 16 of them."""

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        donors = [donor(peer, state_of(1, epoch=9)) for peer in peers]
        with pytest.raises(NotEnoughPeers, match="offers epoch 9, while the swarm is known to be in epoch 0"):
            await joining(joiner, state_of(2), epoch_min=0, epoch_known=lambda: 0).fetch(
                [peer.contact for peer in peers], 60
            )
        assert not any(one.downloads for one in donors)

    play(scenario, donors=2)


def test_the_leases_of_a_cancelled_download_are_closed() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        donors = [donor(peer, state_of(1)) for peer in peers]
        download = joining(joiner, state_of(2))
        assert await download.reserve([peer.contact for peer in peers])
        task = asyncio.create_task(download.fetch([peer.contact for peer in peers], 60))
        await asyncio.sleep(0.8)
        assert all(one.downloads for one in donors)
        task.cancel()
        await asyncio.wait([task])
        assert not any(one.downloads for one in donors)

    play(scenario, donors=2)


@pytest.mark.parametrize(
    ("shard", "keys"),
    [("", ["donors"]), ("3.5", ["donors.3.5"]), ("3.0", ["donors", "donors.3.0"])],
)
def test_donors_of_a_large_run_stand_in_the_dictionary_of_their_shard(shard: str, keys: list[str]) -> None:
    class Dht:
        def __init__(self) -> None:
            self.stored: list[str] = []
            self.deleted: list[str] = []

        async def store(self, key: Key, value: object, **how: Any) -> None:
            self.stored.append(key.name)

        async def delete(self, key: Key, **how: Any) -> None:
            self.deleted.append(key.name)

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        dht = Dht()
        node = SimulatedNode(lambda: joiner.contact, joiner.clock, dht)
        made = Donor(node, RUN, state_of(1), shard=lambda: shard)
        made.start()
        running = asyncio.create_task(made.run())
        await asyncio.sleep(1.0)
        running.cancel()
        await made.close()
        assert sorted(dht.stored) == sorted(dht.deleted) == keys

    play(scenario, donors=1)


def test_a_lease_belongs_to_its_opener_and_requests_are_checked() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        from averaging.optim import exchange as runexchange

        made = donor(peers[0], state_of(1))
        reply = await made.on_open(joiner.peer_id, state_pb2.OpenRequest(run=RUN))
        for caller, request, complaint in [
            (peers[1], state_pb2.ChunksRequest(run=RUN, lease=reply.lease, indices=[0]), "lease is over"),
            (
                joiner,
                state_pb2.ChunksRequest(run=RUN, lease=reply.lease, indices=[99]),
                "there is no number 99",
            ),
            (joiner, state_pb2.ChunksRequest(run=RUN, lease=reply.lease, indices=[0] * 2000), "at most 1024"),
            (
                joiner,
                state_pb2.ChunksRequest(run="another", lease=reply.lease, indices=[0]),
                "does not take part in run 'another'",
            ),
        ]:
            async with caller.caller.open_stream(
                peers[0].contact, runexchange.CHUNKS, timeout_s=10
            ) as stream:
                await stream.send(request.SerializeToString())
                with pytest.raises(PeerError, match=complaint):
                    await stream.receive()

    play(scenario, donors=2)


class _Records:
    """A DHT that remembers which records stand."""

    def __init__(self) -> None:
        self.standing: set[Key] = set()

    async def store(self, key: Key, *args: Any, **options: Any) -> None:
        self.standing.add(key)

    async def delete(self, key: Key, *args: Any, **options: Any) -> None:
        self.standing.discard(key)


def test_a_donor_that_nobody_can_call_has_no_record() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        records, contact = _Records(), Contact(peers[0].peer_id)
        node = SimulatedNode(lambda: contact, peers[0].clock, records)
        made = Donor(node, RUN, state_of(1))
        made.start()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(made.run())
            await asyncio.sleep(60.0)
            assert not records.standing
            contact = peers[0].contact
            await asyncio.sleep(RECORD_RENEW_S)
            assert records.standing
            contact = Contact(peers[0].peer_id)
            await asyncio.sleep(RECORD_RENEW_S)
            assert not records.standing
            running.cancel()

    play(scenario, donors=1)


class _Hashing:
    """The pool of a donor whose state takes some time to be hashed; counts how often that is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes_s: float) -> None:
        self.begun = 0

        def begin(loop: VirtualLoop, pool: object, function: Any, *arguments: Any) -> asyncio.Future[Any]:
            self.begun += isinstance(getattr(function, "__self__", None), Donor)
            return asyncio.ensure_future(after_a_while(function, *arguments))

        async def after_a_while(function: Any, *arguments: Any) -> Any:
            await asyncio.sleep(takes_s)
            return function(*arguments)

        monkeypatch.setattr(VirtualLoop, "run_in_executor", begin)


@pytest.mark.parametrize("only_digest", [False, True])
def test_a_request_whose_time_is_over_does_not_make_the_donor_begin_again(
    only_digest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: a donor's work for one request was lost with it, so that a shorter time limit than
    its hashing takes would never have been enough.
    """

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        hashing, state = _Hashing(monkeypatch, takes_s=8.0), state_of(1)
        made = donor(peers[0], state)
        request = state_pb2.OpenRequest(run=RUN, only_digest=only_digest)
        with pytest.raises(DeadlineExceeded):
            await joiner.caller.call(peers[0].contact, OPEN, request, timeout_s=5.0)
        reply = await joiner.caller.call(peers[0].contact, OPEN, request, timeout_s=5.0)
        assert reply.total_bytes == len(state.snapshot().blob)
        assert hashing.begun == 1
        if only_digest:
            assert not state.views_open, "nobody reads it"
        else:
            assert made.downloads == 1

    play(scenario, donors=1)


def test_a_request_for_a_state_that_is_lost_costs_some_seconds() -> None:
    """Regression test: a newcomer waited for an answer for a minute."""

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        donor(peers[0], state_of(1))
        cut, began_s = network.cut([peers[0]], [joiner]), joiner.clock.monotonic_s()
        task = asyncio.create_task(joining(joiner, state_of(2)).fetch([peers[0].contact], 60))
        await asyncio.sleep(1.0)
        network.heal(cut)
        await task
        assert joiner.clock.monotonic_s() - began_s < OPEN_WAIT_S + 6.0, "the state takes 4 s"

    play(scenario, donors=1)


def test_a_state_that_has_not_changed_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers that come one by one: they can ask for nothing before they have the digests."""
    hashed = []

    def count(pieces: Any) -> bytes:
        hashed.append(1)
        return pieces_digest(pieces)

    monkeypatch.setattr("averaging.optim.state.view.pieces_digest", count)

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        state = state_of(1, chunks=40)
        made = donor(peers[0], state)
        counts = []
        for number, change in enumerate((_nothing, _nothing, _move, _write_unnoticed)):
            change(state)
            hashed.clear()
            reply = await made.on_open(_other(number), state_pb2.OpenRequest(run=RUN))
            counts.append(len(hashed))
            assert reply.chunk_digests == b"".join(state.snapshot().chunk_digests)
            await made.on_close(_other(number), state_pb2.CloseRequest(run=RUN, lease=reply.lease))
        assert counts[0] == counts[2] == 40
        assert counts[1] < 10
        assert counts[3] > 40, "some were hashed before it was known that all must be"

    play(scenario, donors=1)


def _nothing(state: TrainingState) -> None:
    pass


def _move(state: TrainingState) -> None:
    with state.lock, torch.no_grad():
        for parameter in state.parameters:
            parameter.add_(1.0)
        state.mark_changed(state.epoch + 1)


def _write_unnoticed(state: TrainingState) -> None:
    """Write as user code may: torch does not count it."""
    for parameter in state.parameters:
        parameter.data.mul_(2.0)
