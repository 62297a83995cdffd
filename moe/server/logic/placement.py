"""The experts of a grid that a server hosts: those that the grid lacks most, and later others that are needed
more.

Every server reads the same declarations and computes the same plan from them, so no master is needed: an
expert that nobody hosts, or that is far busier than others, gets a server of an expert that can spare one.
The idea is that of SWARM (Ryabinin and others, 2023): peers move from the stage with the shortest queue
to the one with the longest. Two rules keep servers from moving back and forth: a plan must have stood for a
while, and a server that has moved stays for some minutes.

What servers declare about themselves are claims. A false one can attract servers or keep them away, but it
never makes an expert lose its last server.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from moe.protocol.names import ExpertUid
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    import random

# An expert of which the servers compute for a smaller fraction of the time needs no further one.
BUSY_MIN: Final = 0.7
# A server moves only if its old expert is then less busy than this fraction of how busy the new one was.
GAIN: Final = 0.9
WINDOW_S: Final = 10.0  # shorter than the time between two declarations, so that each has a new fraction
SETTLE_S: Final = 20.0  # time that a plan must stand: longer than the time between two declarations
# The same for a move to a busier expert: how busy servers are lags behind what others do.
BUSY_SETTLE_S: Final = 60.0
STAY_S: Final = 300.0  # time that a server stays after it moved, unless an expert has no server at all
PATIENCE_S: Final = 60.0  # time after which the plan continues without a server that does not move
IGNORED_S: Final = 1800.0  # time for which the plan ignores such a server

# By expert: the servers that host it, with the fraction of the time that each of them computes. Experts that
# nobody hosts are in it, too.
GridLoad: TypeAlias = Mapping[ExpertUid, Mapping[PeerId, float]]


@dataclass(frozen=True, slots=True)
class Move:
    """A server gives up one expert for another one."""

    server: PeerId
    source: ExpertUid
    target: ExpertUid


def choose_needed(load: GridLoad, own: PeerId, count: int, rng: random.Random) -> list[ExpertUid]:
    """Return at most `count` experts that a new server hosts: first those without a server, then the busiest
    ones, then those with the fewest servers; equal ones at random, so that servers that start together rarely
    choose the same.
    """
    servers = {uid: len(hosts) for uid, hosts in load.items()}
    busy = {uid: _busy(hosts) for uid, hosts in load.items()}

    def need(uid: ExpertUid) -> tuple[bool, float, int, float]:
        overload = busy[uid] if busy[uid] >= BUSY_MIN else 0.0
        return servers[uid] == 0, overload, -servers[uid], rng.random()

    return sorted(sorted((uid for uid in load if own not in load[uid]), key=need, reverse=True)[:count])


def plan_moves(load: GridLoad, ignored: Collection[PeerId] = ()) -> list[Move]:
    """Return the moves that the grid needs, at most one for each server. Peers with the same `load` compute
    the same plan. `ignored`: servers that do not move.
    """
    servers = {uid: len(hosts) for uid, hosts in load.items()}
    busy = {uid: _busy(hosts) for uid, hosts in load.items()}
    starved = sorted(uid for uid in load if not servers[uid])
    overloaded = sorted((uid for uid in load if busy[uid] >= BUSY_MIN), key=lambda uid: (-busy[uid], uid))
    moves: list[Move] = []
    taken = set(ignored)
    for target in (*starved, *overloaded):
        bound = GAIN * busy[target] if servers[target] else float("inf")
        best = min(
            (
                (afterwards, _draw(target, server), source, server)
                for source, hosts in load.items()
                if source != target and servers[source] >= 2
                for afterwards in (busy[source] * servers[source] / (servers[source] - 1),)
                if afterwards <= bound
                for server in hosts
                if server not in taken and server not in load[target]
            ),
            default=None,
        )
        if best is None:
            continue
        afterwards, _, source, server = best
        moves.append(Move(server, source, target))
        taken.add(server)
        servers[source] -= 1
        busy[source] = afterwards
    return moves


class BusyMeter:
    """The fraction of the time in which a server computes, over at least the last `WINDOW_S`."""

    def __init__(self, now_s: float) -> None:
        self._since_s, self._before_s, self._fraction = now_s, 0.0, 0.0

    def fraction(self, busy_s: float, now_s: float) -> float:
        """Return the fraction, from 0 to 1. `busy_s`: how long the server has computed since it started."""
        elapsed_s = now_s - self._since_s
        if elapsed_s >= WINDOW_S:
            self._fraction = min(max((busy_s - self._before_s) / elapsed_s, 0.0), 1.0)
            self._since_s, self._before_s = now_s, busy_s
        return self._fraction


class Placement:
    """The moves of one server. It is a state machine: times are seconds of a monotonic clock."""

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._since_s: dict[Move, float] = {}  # when each planned move was first seen
        self._ignored: dict[PeerId, float] = {}  # servers that do not move, and until when
        self._moved_s = float("-inf")

    def step(self, load: GridLoad, now_s: float) -> Move | None:
        """Process the present declarations, and return the move that this server should make at once."""
        self._ignored = {server: end_s for server, end_s in self._ignored.items() if now_s < end_s}
        moves = plan_moves(load, self._ignored)
        self._since_s = {move: self._since_s.get(move, now_s) for move in moves}
        for move, since_s in self._since_s.items():
            settle_s = BUSY_SETTLE_S if load[move.target] else SETTLE_S
            if move.server != self._own:
                if now_s - since_s >= settle_s + PATIENCE_S:
                    self._ignored[move.server] = now_s + IGNORED_S
                continue
            rested = not load[move.target] or now_s - self._moved_s >= STAY_S
            if rested and now_s - since_s >= settle_s:
                self._moved_s = now_s
                return move
        return None


def _busy(hosts: Mapping[PeerId, float]) -> float:
    """Return how busy an expert's servers are; with three or more, a single one cannot decide it."""
    return min(max(statistics.median(hosts.values()), 0.0), 1.0) if hosts else 0.0


def _draw(target: ExpertUid, server: PeerId) -> bytes:
    """Return a number by which all peers order servers alike, differently for each target."""
    return hashlib.sha256(f"{target}\0{server}".encode()).digest()
