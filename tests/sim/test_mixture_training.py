"""A training loop over sixteen experts on four simulated servers that crash, freeze and return every few
seconds, from seeds.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from moe.client.mixture.layer import RemoteMixtureOfExperts
from swarm.testing.chance import Chance
from swarm.testing.expert_swarm import ExpertSwarm, SimulatedExperts

WIDTH = 8
EVERY_S = 2.5
STEPS = 100
STEP_S = 0.2  # of local work


def modules(row: int) -> dict[str, nn.Module]:
    torch.manual_seed(row)
    return {
        f"ffn.{row}.{column}": nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        for column in range(4)
    }


class Events:
    """Every few seconds a server crashes or freezes, or one that did returns."""

    def __init__(self, swarm: ExpertSwarm, servers: list[SimulatedExperts], seed: int) -> None:
        self._swarm, self._servers, self._chance = swarm, servers, Chance(seed, "events")
        self._next_s = swarm.now_s + EVERY_S
        self.counts: Counter[str] = Counter()

    def happen(self) -> None:
        if self._swarm.now_s < self._next_s:
            return
        self._next_s += EVERY_S * (0.5 + self._chance.random())
        gone = [server for server in self._servers if not server.peer.up or server.peer.frozen]
        if gone and (len(gone) == 3 or self._chance.happens(0.5)):
            server = self._chance.choice(gone)
            if server.peer.frozen:
                server.peer.frozen = False
                self.counts["thaw"] += 1
            else:
                self._swarm.restart(server)
                self.counts["restart"] += 1
            return
        server = self._chance.choice([server for server in self._servers if server not in gone])
        if self._chance.happens(0.5):
            self._swarm.crash(server)
            self.counts["crash"] += 1
        else:
            server.peer.frozen = True
            self.counts["freeze"] += 1


def train(seed: int) -> tuple[list[float], Counter[str], str, list[float]]:
    """Return (losses, events, traffic of the network, seconds of each step)."""
    with ExpertSwarm(seed) as swarm:
        servers = [swarm.serve(modules(row), learning_rate=0.05) for row in range(4)]
        events = Events(swarm, servers, seed)
        torch.manual_seed(100)
        layer = RemoteMixtureOfExperts(
            swarm.node,
            WIDTH,
            grid="ffn.[0:4].[0:4]",
            k_best=4,
            k_min=1,
            forward_timeout_s=10.0,
            timeout_after_k_min_s=0.3,
        )
        before, after = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 1)
        truth = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).requires_grad_(False)
        optimizer = torch.optim.Adam(
            [*before.parameters(), *layer.parameters(), *after.parameters()], lr=1e-2
        )
        losses, took_s = [], []
        for _ in range(STEPS):
            begun_s = swarm.now_s
            x = torch.randn(32, 4)
            hidden = before(x)
            output = layer(hidden)
            assert isinstance(output, torch.Tensor)
            loss = (after(hidden + output) - 3.0 * truth(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            assert all(one.grad is not None and torch.isfinite(one.grad).all() for one in before.parameters())
            optimizer.step()
            losses.append(loss.item())
            took_s.append(swarm.now_s - begun_s)
            swarm.sleep(STEP_S)
            events.happen()
        return losses, events.counts, swarm.network.digest, took_s


@pytest.mark.parametrize(
    "seed", [4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 5, 6))]
)
def test_training_continues_while_servers_crash_and_return(seed: int) -> None:
    losses, counts, _, took_s = train(seed)
    assert len(losses) == STEPS, "no step failed"
    assert sum(counts.values()) >= 5, counts
    assert counts["crash"] + counts["freeze"] >= 3
    first, last = sum(losses[:15]) / 15, sum(losses[-15:]) / 15
    assert last < 0.5 * first, (first, last)
    assert max(took_s) < 6.0
    assert sum(sorted(took_s)[: STEPS // 2]) / (STEPS // 2) < 0.1, "most steps notice nothing"


@pytest.mark.slow
def test_equal_seeds_give_equal_runs() -> None:
    one, two = train(7), train(7)
    assert one[2] == two[2]
    assert one[0] == two[0]
