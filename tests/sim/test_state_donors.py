"""A donor of a state: what it keeps for downloads, and which requests it refuses."""

from __future__ import annotations

import asyncio

import pytest
import torch

from averaging.optim.state.donor import DonorConfig
from swarm.core.errors import PeerError
from swarm.testing.network import SimulatedNetwork, SimulatedPeer
from swarm.wire import state_pb2
from tests.sim.donors import RUN, donor, joining, play, state_of


def test_a_donor_that_trains_keeps_the_leased_state_and_limits_its_copies() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        state = state_of(1)
        digest = state.snapshot().digest
        made = donor(peers[0], state, snapshots_max=1, leases_max=2)

        async def update() -> None:
            await asyncio.sleep(0.8)
            with state.lock, torch.no_grad():
                state.parameters[0].add_(1.0)
                state.mark_changed(6)
            request = state_pb2.OpenRequest(run=RUN)
            with pytest.raises(PeerError, match="earlier epochs"):
                await made.on_open(joiner.peer_id, request)

        async with asyncio.TaskGroup() as group:
            group.create_task(update())
            task = group.create_task(joining(joiner, state_of(2)).fetch([peers[0].contact], 60))
        assert task.result().digest == digest, "the snapshot is of the moment when the lease was opened"
        reply = await made.on_open(joiner.peer_id, state_pb2.OpenRequest(run=RUN))
        assert reply.epoch == 6
        await made.on_open(joiner.peer_id, state_pb2.OpenRequest(run=RUN))
        with pytest.raises(PeerError, match="busy"):
            await made.on_open(joiner.peer_id, state_pb2.OpenRequest(run=RUN))
        await asyncio.sleep(DonorConfig().lease_idle_s + 1)
        assert (await made.on_open(joiner.peer_id, state_pb2.OpenRequest(run=RUN))).epoch == 6, (
            "idle leases make room"
        )
        with pytest.raises(PeerError, match="epoch 6 only"):
            await made.on_open(joiner.peer_id, state_pb2.OpenRequest(run=RUN, epoch_min=7))

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
