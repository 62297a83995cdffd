"""Donors that serve forged states, to a joiner that knows the electors of the swarm's head."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from averaging.optim.exchange import OPEN
from averaging.optim.state.donor import LEASES_MAX, Donor
from averaging.optim.state.training_state import TrainingState
from averaging.optim.state.view import StateView
from swarm.core.errors import NotEnoughPeers
from swarm.core.ids import Contact
from swarm.testing.network import SimulatedNetwork, SimulatedPeer
from swarm.wire import state_pb2
from tests.sim.donors import RUN, donor, joining, play, state_of


def forged(epoch: int, value: float = 777.0) -> TrainingState:
    state = state_of(1, epoch)
    with torch.no_grad():
        state.parameters[0].fill_(value)
    state.inner.param_groups[0]["lr"] = 123.0
    state.canonical = True
    return state


class HalfTrueDonor(Donor):
    """A donor that declares the true digests and sends every second chunk changed."""

    async def _chunk(self, view: StateView, index: int) -> bytes:
        message = await super()._chunk(view, index)
        return message if index % 2 == 0 else message[:-1] + bytes([message[-1] ^ 1])


class SilentDonor(Donor):
    """A donor that does not say what it holds, nor gives it: its process hangs."""

    async def on_open(self, peer: object, request: state_pb2.OpenRequest) -> state_pb2.OpenReply:
        raise NotImplementedError


class CountedState(TrainingState):
    """A state that counts how often it is read."""

    views = 0

    def view(self, *args: Any, **options: Any) -> StateView:
        self.views += 1
        return super().view(*args, **options)


def contacts(peers: list[SimulatedPeer]) -> list[Contact]:
    return [peer.contact for peer in peers]


async def occupy(peer: SimulatedPeer, network: SimulatedNetwork) -> None:
    """Take all places for downloads at a donor."""
    for _ in range(LEASES_MAX):
        await network.peer().caller.call(
            peer.contact, OPEN, state_pb2.OpenRequest(run=RUN, reserve=True), timeout_s=5.0
        )


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
        download = joining(joiner, mine, electors=lambda: contacts([honest]))
        assert await download.reserve(contacts(peers))
        fetched = await download.fetch(contacts(peers), 60)
        assert fetched.digest == state_of(1).snapshot().digest
        assert set(fetched.donors) == {honest.peer_id}
        assert all("differs from that of the electors" in download.failures[peer.peer_id] for peer in wrong)
        mine.load(fetched.blob)
        assert mine.inner.param_groups[0]["lr"] == 0.1

    play(scenario, donors=liars + 1)


@pytest.mark.parametrize("honest_is_elector", [True, False])
def test_one_honest_donor_gives_the_state_among_ten_liars_of_every_kind(honest_is_elector: bool) -> None:
    """Later epochs, other digests and half-true chunks; the electors themselves are busy."""

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        honest, *others = peers
        electors, wrong = others[:3], others[3:]
        states = [forged(5 + number % 3, float(number)) for number in range(4)] + [forged(6)] * 4
        for peer, state in zip(wrong, states, strict=False):
            donor(peer, state)
        for peer in wrong[len(states) :]:
            donor(peer, state_of(1), HalfTrueDonor)
        for peer in (honest, *electors):
            donor(peer, state_of(1))
        for peer in electors:
            await occupy(peer, network)
        decide = [*electors, honest] if honest_is_elector else electors
        download = joining(joiner, state_of(2), electors=lambda: contacts(decide))
        declared = contacts([*wrong, honest, *electors])
        assert await download.reserve(declared)
        fetched = await download.fetch(declared, 300)
        assert fetched.digest == state_of(1).snapshot().digest
        named = [peer for peer in wrong if "differs from" in download.failures.get(peer.peer_id, "")]
        assert named
        assert download.liars <= {peer.peer_id for peer in wrong[len(states) :]}
        assert honest.peer_id in fetched.donors
        assert not fetched.donors.keys() & {peer.peer_id for peer in wrong[: len(states)]}

    play(scenario, donors=14)


@pytest.mark.parametrize("electors", [3, 4])
def test_a_minority_of_lying_electors_does_not_choose_the_state(electors: int) -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        donor(peers[0], forged(7))
        for peer in peers[1:]:
            donor(peer, state_of(1))
        download = joining(joiner, state_of(2), electors=lambda: contacts(peers))
        fetched = await download.fetch(contacts(peers), 60)
        assert fetched.digest == state_of(1).snapshot().digest
        assert peers[0].peer_id in download.failures

    play(scenario, donors=electors)


def test_a_lying_elector_does_not_choose_the_state_while_the_others_are_busy() -> None:
    """Regression test: only electors that had a place for a download were heard."""

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        liar, *honest = peers
        donor(liar, forged(6))
        for peer in honest:
            donor(peer, state_of(1))
            await occupy(peer, network)
        download = joining(joiner, state_of(2), electors=lambda: contacts(peers))
        assert await download.reserve(contacts(peers))
        with pytest.raises(NotEnoughPeers, match="busy"):
            await download.fetch(contacts(peers), 60)

    play(scenario, donors=3)


@pytest.mark.parametrize("waits", [True, False])
def test_while_most_electors_are_silent_no_state_is_taken_for_some_time(waits: bool) -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        one, *silent = peers
        donor(one, state_of(1))
        for peer in silent:
            donor(peer, state_of(1), SilentDonor)
        download = joining(
            joiner, state_of(2), electors=lambda: contacts([*silent, one]), waits_for_electors=waits
        )
        fetch = functools.partial(download.fetch, [one.contact], 60)
        if waits:
            with pytest.raises(NotEnoughPeers, match="have not said which state they hold"):
                await fetch()
        else:
            assert (await fetch()).digest == state_of(1).snapshot().digest
        network.errors.clear()  # of the silent peers' handlers

    play(scenario, donors=3)


def test_an_elector_hashes_its_state_once_however_many_ask_which_one_it_holds() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        state = CountedState(state_of(1).inner)
        state.epoch = 5
        made = donor(peers[0], state)
        request = state_pb2.OpenRequest(run=RUN, only_digest=True)
        for _ in range(5):
            reply = await network.peer().caller.call(peers[0].contact, OPEN, request, timeout_s=60.0)
            assert reply.digest == state_of(1).snapshot().digest
        assert state.views == 1
        assert made.downloads == 0
        assert not made.leased_views()

    play(scenario, donors=1)
