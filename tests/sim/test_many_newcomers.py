"""Many newcomers at once with one donor on simulated links: they take turns, and serve each other."""

from __future__ import annotations

import asyncio

import pytest

from averaging.optim.state.donor import Donor
from averaging.optim.state.view import StateView
from swarm.core.backoff import Backoff
from swarm.core.ids import Contact
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer
from tests.sim.donors import CHUNKS, donor, joining, play, state_of

NEWCOMERS = 32
BYTES_PER_S = 2e6
UPLOAD_S = CHUNKS * (1 << 20) / BYTES_PER_S  # of one state, by one donor that does nothing else


class _Uplink(Donor):
    """A donor whose downloads share its uplink."""

    free_s = 0.0

    async def _chunk(self, view: StateView, index: int) -> bytes:
        chunk = await super()._chunk(view, index)
        now_s = asyncio.get_running_loop().time()
        self.free_s = max(self.free_s, now_s) + len(chunk) / BYTES_PER_S
        await asyncio.sleep(self.free_s - now_s)
        return chunk


@pytest.mark.parametrize("seed", range(3))
def test_newcomers_that_have_loaded_serve_those_that_wait(seed: int) -> None:
    """One donor alone would need 32 uploads in sequence."""

    async def scenario(network: SimulatedNetwork, founder: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        source = state_of(1)
        donors = [donor(founder, source, _Uplink)]
        declared: list[Contact] = [founder.contact]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        loaded_s = []

        async def join(peer: SimulatedPeer) -> None:
            chance, state = peer.chance, state_of(2)
            retries = Backoff(0.25, 4.0, chance)
            while True:
                found = [contact for contact in declared if contact.peer_id != peer.peer_id]
                chance.shuffle(found)
                download = joining(peer, state)
                if await download.reserve(found):
                    fetched = await download.fetch(found, 600)
                    break
                await asyncio.sleep(retries.next_s())
            state.load(fetched.blob)
            loaded_s.append(loop.time() - began_s)
            donors.append(donor(peer, state, _Uplink))
            declared.append(peer.contact)

        async with asyncio.TaskGroup() as group:
            for peer in peers:
                group.create_task(join(peer))
        assert len(loaded_s) == NEWCOMERS
        assert max(loaded_s) < 12 * UPLOAD_S, sorted(round(at_s / UPLOAD_S, 1) for at_s in loaded_s)
        assert not any(one.downloads for one in donors)

    play(scenario, donors=NEWCOMERS, seed=seed, link=LinkConfig())
