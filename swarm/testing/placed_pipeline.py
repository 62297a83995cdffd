"""A pipeline whose servers place themselves (`moe.server.logic.placement`), while some fail and others join:
a model of its throughput in virtual seconds, compared with that of the best placement.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from moe.protocol.declarations import RENEW_S, TTL_S
from moe.protocol.names import ExpertUid
from moe.server.logic.placement import GridLoad, Placement, choose_needed
from swarm.core.ids import PeerId

_TURN_S: Final = 3.7  # between the declarations of two servers
_LOST_S_MAX: Final = 3600.0  # a stage that no server has taken by then stays lost


@dataclass
class PlacedServer:
    """A server of one stage."""

    peer: PeerId
    stage: ExpertUid
    machine: Placement
    moves_s: list[float] = field(default_factory=list)


class PlacedPipeline:
    """A pipeline that is never idle: its slowest stage is always busy. Servers declare themselves as often as
    real ones, and a dead one is found for as long. Throughputs are in batches of one server a second.
    """

    def __init__(self, seed: int, servers: int, stages: Sequence[ExpertUid]) -> None:
        self.rng, self.stages = random.Random(seed), list(stages)
        self.servers: list[PlacedServer] = []
        self.declared: dict[PeerId, tuple[ExpertUid, float, float]] = {}  # stage, busy, until
        # what was computed, and what the best placement of the same servers would have
        self.now_s, self.computed, self.possible = 0.0, 0.0, 0.0
        for _ in range(servers):
            self.join()

    def join(self) -> None:
        """Add a server at the stage that needs one most."""
        peer = PeerId(self.rng.randbytes(32))
        (stage,) = choose_needed(self.load(), peer, 1, self.rng)
        self.servers.append(PlacedServer(peer, stage, Placement(peer)))
        self._declare(self.servers[-1])

    def fail(self) -> None:
        """Remove a server, drawn at random, without a word."""
        self.servers.remove(self.rng.choice(self.servers))

    def rate(self) -> float:
        """Return the present throughput: that of the stage with the fewest servers."""
        counts = Counter(one.stage for one in self.servers)
        return float(min(counts[stage] for stage in self.stages))

    def load(self) -> GridLoad:
        """Return the declarations that are found now."""
        live = {peer: one for peer, one in self.declared.items() if self.now_s < one[2]}
        return {
            stage: {peer: busy for peer, (at, busy, _) in live.items() if at == stage}
            for stage in self.stages
        }

    def second(self) -> None:
        """Let a second pass."""
        self.now_s += 1.0
        self.computed += self.rate()
        self.possible += len(self.servers) // len(self.stages)
        for number, server in enumerate(self.servers):
            if (self.now_s + _TURN_S * number) % RENEW_S < 1.0:
                self._declare(server)
                move = server.machine.step(self.load(), self.now_s)
                if move is not None:
                    server.stage = move.target
                    server.moves_s.append(self.now_s)
                    self._declare(server)

    def run_with_departures(self, seconds: int, every_s: float) -> None:
        """Let time pass, in which a server fails every `every_s` on average, and one joins as often."""
        for _ in range(seconds):
            self.second()
            if self.rng.random() < 1.0 / every_s:
                self.fail()
            if self.rng.random() < 1.0 / every_s:
                self.join()

    def lose(self, stage: ExpertUid) -> float:
        """Let all servers of a stage fail at once, and return the seconds until it has one again, at most an
        hour.
        """
        self.servers = [one for one in self.servers if one.stage != stage]
        begun_s = self.now_s
        while not self.rate() and self.now_s - begun_s < _LOST_S_MAX:
            self.second()
        return self.now_s - begun_s

    def _declare(self, server: PlacedServer) -> None:
        counts = Counter(one.stage for one in self.servers)
        busy = self.rate() / counts[server.stage] if self.rate() else 0.0
        self.declared[server.peer] = server.stage, busy, self.now_s + TTL_S
