"""Donors and a joiner on a simulated network: a donor that lies, dies or stalls is named, and the state
still arrives.
"""

from __future__ import annotations

import asyncio

import pytest
import torch

from averaging.optim.exchange import parse_chunks_request
from averaging.optim.state.donor import Donor
from averaging.optim.state.download import Download, DownloadedState
from averaging.optim.state.snapshot import CHUNK_BYTES
from averaging.optim.state.training_state import TrainingState
from averaging.optim.state.view import StateView
from swarm.core.errors import DeadlineExceeded, NotEnoughPeers, PeerError
from swarm.net.rpc import Stream
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer
from swarm.wire import state_pb2
from tests.sim.donors import CHUNKS, donor, joining, play, state_of


def test_chunks_come_from_all_donors_of_the_same_state() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        states = [state_of(1) for _ in peers]
        donors = [donor(peer, state) for peer, state in zip(peers, states, strict=True)]
        told: list[tuple[int, int]] = []
        download = joining(joiner, state_of(2), on_progress=lambda got, of: told.append((got, of)))
        fetched = await download.fetch([peer.contact for peer in peers], 60)
        mine = state_of(2)
        mine.load(fetched.blob)
        assert mine.snapshot().digest == fetched.digest == states[0].snapshot().digest
        assert set(fetched.donors) == {peer.peer_id for peer in peers}
        assert not fetched.failures
        assert told[-1] == (len(fetched.blob), len(fetched.blob))
        assert not any(one.downloads for one in donors), "leases are closed when the download is over"
        assert not any(state.views_open for state in states), "and the copies are let go"

    play(scenario)


def test_a_download_continues_when_the_callers_display_of_its_progress_fails() -> None:
    """Regression test: an ExceptionGroup came out of `load_state_from_peers`."""

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        for peer in peers:
            donor(peer, state_of(1))
        told: list[int] = []

        def fail(got: int, of: int) -> None:
            told.append(got)
            raise ValueError("no terminal")

        mine = state_of(2)
        fetched = await joining(joiner, mine, on_progress=fail).fetch([peer.contact for peer in peers], 60)
        mine.load(fetched.blob)
        assert told[-1] == len(fetched.blob)
        assert not fetched.failures

    play(scenario)


class _Slow(Donor):
    """A donor behind a link of 50 Mbit/s: each chunk waits until those before it have passed."""

    free_s = 0.0

    async def _chunk(self, view: StateView, index: int) -> bytes:
        chunk = await super()._chunk(view, index)
        now_s = asyncio.get_running_loop().time()
        self.free_s = max(self.free_s, now_s) + len(chunk) / (50e6 / 8)
        await asyncio.sleep(self.free_s - now_s)
        return chunk


def test_three_slow_donors_are_two_and_a_half_times_as_fast_as_one() -> None:
    took_s: dict[int, float] = {}
    torch.manual_seed(1)
    elements = 48 * CHUNK_BYTES // 4
    states = [
        TrainingState(torch.optim.SGD([torch.nn.Parameter(torch.ones(elements))], lr=0.1)) for _ in range(4)
    ]

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        for state, peer in zip(states, peers, strict=False):
            donor(peer, state, _Slow)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        download = joining(joiner, states[3], epoch_min=0, epoch_known=lambda: 0)
        fetched = await download.fetch([peer.contact for peer in peers], 600)
        took_s[len(peers)] = loop.time() - began_s
        assert sum(fetched.donors.values()) == len(fetched.blob)
        assert min(fetched.donors.values()) >= len(fetched.blob) / (len(peers) + 1), "each gives its share"

    for donors in (1, 3):
        play(scenario, donors=donors, link=LinkConfig(delay_s=0.025))
    assert took_s[1] / took_s[3] >= 2.5, took_s


class _Liar(Donor):
    """A donor that declares the same state as the others and sends other bytes."""

    async def on_chunks(self, first: state_pb2.ChunksRequest, stream: Stream) -> None:
        request = first
        while True:
            for _ in request.indices:
                await stream.send(bytes(CHUNK_BYTES))
            message = await stream.receive()
            if message is None:
                return
            request = parse_chunks_request(message)


class _TwoMessages:
    """A stream on which at most two messages are sent, for one request."""

    def __init__(self, stream: Stream) -> None:
        self.peer_id, self._stream, self._sent = stream.peer_id, stream, 0

    async def send(self, message: bytes) -> None:
        if self._sent == 2:
            raise PeerError("out of memory")
        self._sent += 1
        await self._stream.send(message)

    async def receive(self) -> bytes | None:
        raise PeerError("out of memory")


class _Quitter(Donor):
    """A donor that sends two chunks and stops."""

    async def on_chunks(self, first: state_pb2.ChunksRequest, stream: Stream) -> None:
        await super().on_chunks(first, _TwoMessages(stream))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "complaint"), [(_Liar, "digest differs from the declared one"), (_Quitter, "out of memory")]
)
def test_a_bad_donor_is_named_and_the_others_give_the_rest(kind: type[Donor], complaint: str) -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        donor(peers[0], state_of(1), kind)
        donor(peers[1], state_of(1))
        fetched = await joining(joiner, state_of(2)).fetch([peer.contact for peer in peers[:2]], 60)
        assert complaint in fetched.failures[peers[0].peer_id]
        state_of(2).load(fetched.blob)

    play(scenario)


def test_a_donor_that_dies_half_way_costs_only_its_unsent_chunks() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        for peer in peers[:2]:
            donor(peer, state_of(1))
        gone = peers[0]

        async def kill() -> None:
            await asyncio.sleep(0.8)
            await network.crash(gone)

        async with asyncio.TaskGroup() as group:
            group.create_task(kill())
            task = group.create_task(
                joining(joiner, state_of(2)).fetch([peer.contact for peer in peers[:2]], 60)
            )
        fetched: DownloadedState = task.result()
        assert gone.peer_id in fetched.failures
        assert sum(fetched.donors.values()) == len(fetched.blob), "no chunk was downloaded twice"
        assert fetched.donors[gone.peer_id] > 0
        state_of(2).load(fetched.blob)

    play(scenario)


def test_a_frozen_donor_delays_nothing() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        for peer in peers[:2]:
            donor(peer, state_of(1))

        async def freeze() -> None:
            await asyncio.sleep(0.8)
            peers[0].frozen = True

        loop = asyncio.get_running_loop()
        began_s = loop.time()
        async with asyncio.TaskGroup() as group:
            group.create_task(freeze())
            task = group.create_task(
                joining(joiner, state_of(2)).fetch([peer.contact for peer in peers[:2]], 60)
            )
        fetched = task.result()
        assert loop.time() - began_s < 5.0, (
            "what it was asked for comes from the other, before it counts as dead"
        )
        assert sum(fetched.donors.values()) == len(fetched.blob)
        state_of(2).load(fetched.blob)

    play(scenario)


def test_a_download_from_a_single_frozen_donor_fails() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        donor(peers[0], state_of(1))
        download = joining(joiner, state_of(2))

        async def freeze() -> None:
            await asyncio.sleep(0.8)
            peers[0].frozen = True

        async with asyncio.TaskGroup() as group:
            group.create_task(freeze())
            with pytest.raises(NotEnoughPeers):
                await download.fetch([peers[0].contact], 60)
        assert peers[0].peer_id in download.failures

    play(scenario, donors=1)


def test_a_download_resumes_after_a_broken_connection_without_fetching_a_chunk_twice() -> None:
    """The joiner's cable is out for ten seconds, while the swarm continues to another epoch: donors keep
    leased states.
    """

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        states = [state_of(1) for _ in peers]
        donors = [donor(peer, state) for peer, state in zip(peers, states, strict=True)]
        digest = states[0].snapshot().digest
        download = joining(joiner, state_of(2))

        async def cut() -> None:
            await asyncio.sleep(1.2)
            network.partition([joiner])
            for state in states:
                with state.lock, torch.no_grad():
                    state.parameters[0].add_(1.0)
                    state.mark_changed(6)
            await asyncio.sleep(10.0)
            assert 0 < len(download.partial.have) < CHUNKS if download.partial else False
            network.heal()

        async with asyncio.TaskGroup() as group:
            group.create_task(cut())
            task = group.create_task(download.fetch([peer.contact for peer in peers], 60))
        fetched = task.result()
        assert fetched.digest == digest
        assert download.received_bytes == len(fetched.blob), "every chunk once"
        assert not any(one.downloads for one in donors), "the leases of before the break are closed, too"
        mine = state_of(2)
        mine.load(fetched.blob)
        assert mine.snapshot().digest == digest

    play(scenario)


def test_chunks_of_a_failed_download_serve_the_next() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        donor(peers[0], state_of(1))
        download = joining(joiner, state_of(2))

        async def kill() -> None:
            await asyncio.sleep(0.8)
            await network.crash(peers[0])

        async with asyncio.TaskGroup() as group:
            group.create_task(kill())
            with pytest.raises(NotEnoughPeers):
                await download.fetch([peers[0].contact], 60)
        before = download.received_bytes
        assert before > 0
        donor(peers[1], state_of(1))
        again = joining(joiner, state_of(2), partial=download.partial)
        fetched = await again.fetch([peers[1].contact], 60)
        assert again.received_bytes == len(fetched.blob) - before
        state_of(2).load(fetched.blob)

    play(scenario, donors=2)


def test_a_donor_that_fails_is_replaced_by_one_that_was_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.optim.state.download.DONORS_MAX", 1)

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        donor(peers[0], state_of(1), _Liar)
        donor(peers[1], state_of(1), _Quitter)
        donor(peers[2], state_of(1))
        download = joining(joiner, state_of(2))
        fetched = await download.fetch([peer.contact for peer in peers], 60)
        assert download.liars == {peers[0].peer_id}, "liars are distinguished from failed donors"
        assert set(fetched.failures) == {peers[0].peer_id, peers[1].peer_id}
        assert fetched.donors.keys() == {peers[1].peer_id, peers[2].peer_id}

    play(scenario)


def test_the_state_of_most_donors_is_taken() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        donor(peers[0], state_of(7))
        for peer in peers[1:]:
            donor(peer, state_of(1))
        fetched = await joining(joiner, state_of(2)).fetch([peer.contact for peer in peers], 60)
        assert fetched.digest == state_of(1).snapshot().digest

    play(scenario)


@pytest.mark.parametrize(
    ("seeds", "taken"), [((1, 1, 2), 1), ((2, 1, 1), 1), ((1, 2), None), ((1, 2, 3), None), ((4,), 4)]
)
def test_with_majority_only_the_state_of_most_answering_donors_is_taken(
    seeds: tuple[int, ...], taken: int | None
) -> None:
    """The majority's state is taken even if other donors claim a higher epoch."""

    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        for place, seed in enumerate(seeds):
            donor(peers[place], state_of(seed, epoch=5 if seed == taken else 6))
        download = joining(joiner, state_of(9), majority=True)
        contacts = [peer.contact for peer in peers[: len(seeds)]]
        if taken is None:
            with pytest.raises(NotEnoughPeers, match="hold different states"):
                await download.fetch(contacts, 30.0)
            return
        fetched = await download.fetch(contacts, 30.0)
        assert fetched.digest == state_of(taken).snapshot().digest
        assert fetched.agreed == seeds.count(taken)

    play(scenario)


def test_impossible_offers_are_refused_by_name() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        donor(peers[0], state_of(1, epoch=10**9))
        donor(peers[1], state_of(1, epoch=2))
        small = torch.nn.Parameter(torch.ones(10))
        mine = TrainingState(torch.optim.SGD([small], lr=0.1))
        donor(peers[2], state_of(1))
        download = joining(joiner, mine)
        with pytest.raises(NotEnoughPeers, match="no peer could give the state") as caught:
            await download.fetch([peer.contact for peer in peers], 60)
        assert "another model" in str(caught.value)
        assert "epoch 1000000000, while the swarm is known to be in epoch 5" in (
            await _complaint(joining(joiner, state_of(2)), peers[0])
        )
        assert "epoch 2 only" in await _complaint(joining(joiner, state_of(2)), peers[1])

    async def _complaint(download: Download, peer: SimulatedPeer) -> str:
        with pytest.raises(NotEnoughPeers):
            await download.fetch([peer.contact], 60)
        return download.failures[peer.peer_id]

    play(scenario)


def test_a_download_ends_by_its_deadline() -> None:
    async def scenario(network: SimulatedNetwork, joiner: SimulatedPeer, peers: list[SimulatedPeer]) -> None:
        donor(peers[0], state_of(1))
        with pytest.raises(DeadlineExceeded, match="not downloaded within 1 s"):
            await joining(joiner, state_of(2)).fetch([peers[0].contact], 1.0)
        with pytest.raises(NotEnoughPeers, match="no peer declares"):
            await joining(joiner, state_of(2)).fetch([], 1.0)

    play(scenario, donors=1)
