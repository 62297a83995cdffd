"""Donors of a state and a joiner on a simulated network: shared parts of the tests of the transfer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import torch

from averaging.optim.exchange import RunExchange
from averaging.optim.state.donor import Donor
from averaging.optim.state.download import Download
from averaging.optim.state.snapshot import CHUNK_BYTES
from averaging.optim.state.training_state import TrainingState
from swarm.testing.network import LinkConfig, SimulatedNetwork, SimulatedPeer
from swarm.testing.simulated_node import SimulatedNode
from swarm.testing.virtual_loop import run_virtual

RUN = "run"
CHUNKS = 8
LINK = LinkConfig(bandwidth=2e6)  # a chunk takes half a second; two of each donor are on their way


def state_of(seed: int, epoch: int = 5, chunks: int = CHUNKS) -> TrainingState:
    torch.manual_seed(seed)
    p = torch.nn.Parameter(torch.randn(chunks * CHUNK_BYTES // 4 - 1000))
    state = TrainingState(torch.optim.SGD([p], lr=0.1))
    state.epoch = epoch
    return state


class _NoDht:
    async def store(self, *args: Any, **options: Any) -> None:
        return None

    delete = store


def donor(peer: SimulatedPeer, state: TrainingState, wrap: type[Donor] = Donor) -> Donor:
    node = SimulatedNode(lambda: peer.contact, peer.clock, _NoDht())
    made = wrap(node, RUN, state)
    made.start()
    RunExchange(peer.handlers.unary, peer.handlers.stream).add(RUN, None, made)  # type: ignore[arg-type]
    return made


def joining(peer: SimulatedPeer, state: TrainingState, **changes: Any) -> Download:
    options = {
        "bytes_max": state.bytes_max(),
        "epoch_min": 5,
        "epoch_known": lambda: 5,
        **changes,
    }
    return Download(run=RUN, caller=peer.caller, **options)


Scenario = Callable[[SimulatedNetwork, SimulatedPeer, list[SimulatedPeer]], Awaitable[None]]


def play(scenario: Scenario, donors: int = 3, seed: int = 1, link: LinkConfig = LINK) -> None:
    async def main() -> None:
        network = SimulatedNetwork(seed, link)
        peers = [network.peer() for _ in range(donors + 1)]
        await scenario(network, peers[0], peers[1:])
        assert not network.errors
        await network.close()

    run_virtual(main(), limit_s=3600)
