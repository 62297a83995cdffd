"""A member with a slow way out, in virtual time: it is waited for while it moves and there is time, and costs
nobody else anything.
"""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from averaging.allreduce.config import RoundConfig
from averaging.allreduce.outcome import RoundOutcome
from averaging.matchmaking.logic.group import Group, Member
from averaging.reduction.speed import UNKNOWN_BYTES_PER_S
from swarm.core.ids import PeerId
from swarm.testing.network import LinkConfig, SimulatedNetwork
from swarm.testing.rounds import run_round
from swarm.testing.uplink import Uplink
from swarm.testing.virtual_loop import run_virtual

# beneath our messages, as measured for a beat: TLS, HTTP/2, gRPC, the envelope of a shared call
WIRE_PER_MESSAGE = 100


class Scene:
    """Four members, the last of which has a slow way out; nobody's speed is known, unless it is given."""

    def __init__(self, seed: int, *, numel: int, up_bytes_per_s: float, known: bool = False) -> None:
        rng = random.Random(seed)
        self.network = SimulatedNetwork(seed, LinkConfig(delay_s=rng.uniform(0.005, 0.05)))
        self.peers = [self.network.peer() for _ in range(4)]
        for peer in self.peers[:3]:
            peer.uplink = Uplink(12.5e6)
        self.slow = self.peers[3]
        self.slow.uplink = Uplink(up_bytes_per_s)
        members = [
            Member(
                contact=peer.contact,
                weight=1.0,
                bandwidth=up_bytes_per_s if known and peer is self.slow else UNKNOWN_BYTES_PER_S,
            )
            for peer in self.peers
        ]
        rng.shuffle(members)
        self.group = Group(
            group_id=rng.randbytes(32), members=tuple(members), codec="float32", gathered=(b"",) * 4
        )
        generator = torch.Generator().manual_seed(seed)
        self.vectors = [torch.randn(numel, generator=generator) for _ in self.peers]

    def run(self, deadline_s: float) -> tuple[list[RoundOutcome], float]:
        """Everybody's outcome, and how long it took."""

        async def main() -> tuple[list[RoundOutcome], float]:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            outcomes = await run_round(
                self.network, self.group, self.vectors, timeout_s=deadline_s, config=RoundConfig()
            )
            return outcomes, loop.time() - began_s

        return run_virtual(main())

    def fractions(self, outcome: RoundOutcome) -> dict[PeerId, float]:
        return {peer.peer_id: outcome.contributions.get(peer.peer_id, 0.0) for peer in self.peers}


def agreed(outcomes: list[RoundOutcome]) -> RoundOutcome:
    """All committed, and hold the same."""
    assert [outcome.reason for outcome in outcomes] == [None] * len(outcomes)
    assert len({outcome.digest for outcome in outcomes}) == 1
    return outcomes[0]


@pytest.mark.parametrize("up_bytes_per_s", [40e3, 125e3, 400e3])
@pytest.mark.parametrize("seed", range(3))
def test_a_member_with_slow_steady_progress_is_waited_for(seed: int, up_bytes_per_s: float) -> None:
    """The first round: shares are equal, since no speed is known, and the slow one's last bytes arrive when
    its link has carried them.
    """
    scene = Scene(seed, numel=1 << 18, up_bytes_per_s=up_bytes_per_s)
    outcomes, took_s = scene.run(deadline_s=120.0)
    outcome = agreed(outcomes)
    assert scene.fractions(outcome) == dict.fromkeys(scene.fractions(outcome), 1.0)
    assert not outcome.left_out
    assert outcome.vector is not None
    assert torch.allclose(outcome.vector, torch.stack(scene.vectors).mean(dim=0), atol=1e-6)
    carried_s = 1.5 * 4 * (1 << 18) / up_bytes_per_s
    assert took_s < 1.1 * carried_s + 1.0


@pytest.mark.parametrize("up_bytes_per_s", [15e3, 60e3])
@pytest.mark.parametrize("seed", range(3))
def test_a_member_too_slow_for_the_deadline_is_left_out_and_other_values_are_complete(
    seed: int, up_bytes_per_s: float
) -> None:
    scene = Scene(seed, numel=1 << 19, up_bytes_per_s=up_bytes_per_s)
    outcomes, took_s = scene.run(deadline_s=30.0)
    slow = scene.slow.peer_id
    fast = [outcome for outcome, peer in zip(outcomes, scene.peers, strict=True) if peer is not scene.slow]
    outcome = agreed(fast)
    assert all(fraction == 1.0 for peer, fraction in scene.fractions(outcome).items() if peer != slow)
    for one in fast:
        assert set(one.left_out) == {slow}
    assert took_s < 30.0


@pytest.mark.parametrize("seed", range(2))
def test_framing_of_a_round_that_takes_seconds_is_at_most_2_per_cent(seed: int) -> None:
    scene = Scene(seed, numel=1 << 18, up_bytes_per_s=125e3, known=True)
    outcomes, took_s = scene.run(deadline_s=120.0)
    agreed(outcomes)
    assert took_s > 6.0
    wire = sum(peer.bytes_sent + WIRE_PER_MESSAGE * peer.messages_sent for peer in scene.peers)
    assert wire <= 1.02 * 2 * 3 * 4 * (1 << 18)
