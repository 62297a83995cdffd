"""Donors that serve forged states, to a joiner that knows the electors of the swarm's head."""

from __future__ import annotations

import pytest
import torch

from averaging.optim.state.training_state import TrainingState
from swarm.testing.network import SimulatedNetwork, SimulatedPeer
from tests.sim.donors import donor, joining, play, state_of


def forged(epoch: int) -> TrainingState:
    state = state_of(1, epoch)
    with torch.no_grad():
        state.parameters[0].fill_(777.0)
    state.inner.param_groups[0]["lr"] = 123.0
    state.canonical = True
    return state


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("liars", [1, 4])
def test_one_honest_elector_gives_the_state_among_liars_that_claim_later_epochs_and_they_are_named(
    ahead: int, liars: int
) -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        *wrong, honest = peers
        for peer in wrong:
            donor(peer, forged(5 + ahead))
        donor(honest, state_of(1))
        mine = state_of(2)
        download = joining(joiner, mine, electors=lambda: (honest.peer_id,))
        contacts = [peer.contact for peer in peers]
        assert await download.reserve(contacts)
        fetched = await download.fetch(contacts, 60)
        assert fetched.digest == state_of(1).snapshot().digest
        assert set(fetched.donors) == {honest.peer_id}
        assert all("differs from that of most electors" in download.failures[peer.peer_id] for peer in wrong)
        mine.load(fetched.blob)
        assert mine.inner.param_groups[0]["lr"] == 0.1

    play(scenario, donors=liars + 1)


@pytest.mark.parametrize("electors", [3, 4])
def test_a_minority_of_lying_electors_does_not_choose_the_state(electors: int) -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        donor(peers[0], forged(7))
        for peer in peers[1:]:
            donor(peer, state_of(1))
        download = joining(joiner, state_of(2), electors=lambda: [peer.peer_id for peer in peers])
        fetched = await download.fetch([peer.contact for peer in peers], 60)
        assert fetched.digest == state_of(1).snapshot().digest
        assert peers[0].peer_id in download.failures

    play(scenario, donors=electors)
