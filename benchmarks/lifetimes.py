"""Peers that are killed and restarted: random kill times from a seed, and the work that counted.

Free of I/O.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# The phases of a start, by the volunteer's event that ends each.
PHASES = {
    "listening": "Python, gRPC, the node",
    "run": "the run's specification",
    "joined": "torch, model and data, the state",
    "contributing": "the first round with its samples",
}
STATE = "of it the download of the state"


@dataclass(frozen=True, slots=True, order=True)
class Kill:
    at_s: float  # seconds since the window began
    peer: int


def draw_kills(rng: random.Random, *, peers: int, mean_s: float, seconds: float) -> list[Kill]:
    """Draw kill times for each peer independently: the time to its next kill is exponential, also while it
    starts.
    """
    found = []
    for peer in range(peers):
        at_s = rng.expovariate(1.0 / mean_s)
        while at_s < seconds:
            found.append(Kill(at_s, peer))
            at_s += rng.expovariate(1.0 / mean_s)
    return sorted(found)


@dataclass(slots=True)
class ProcessLifetime:
    """One process of one peer, from its start to its end. All moments are of one clock."""

    peer: int
    started_s: float
    restarted: bool  # this process follows a kill
    moments_s: dict[str, float] = field(default_factory=dict)  # the first event of each kind
    # when samples were reported, and how many of them are in the swarm's steps
    counted: list[tuple[float, int]] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)  # held-out
    state_s: float | None = None  # duration of the download
    failed_rounds: int = 0
    resynchronised: int = 0
    ended_s: float | None = None

    def take(self, event: Mapping[str, Any], now_s: float) -> None:
        """Record an event that the process printed at `now_s`."""
        kind = event["event"]
        self.moments_s.setdefault(kind, now_s)
        if kind == "epoch":
            self.counted.append((now_s, event["samples"]))
            if event["validation_loss"] is not None:
                self.losses.append((now_s, event["validation_loss"]))
        elif kind == "state":
            self.state_s = event["seconds"]
        elif kind == "round_failed":
            self.failed_rounds += 1
        elif kind == "resynchronised":
            self.resynchronised += 1

    def contributing_s(self, since_s: float, until_s: float) -> float:
        """Return for how long it trained within this window: from its first contribution to its end."""
        begin_s = self.moments_s.get("contributing")
        if begin_s is None:
            return 0.0
        end_s = until_s if self.ended_s is None else min(self.ended_s, until_s)
        return max(0.0, end_s - max(begin_s, since_s))

    @property
    def phases_s(self) -> dict[str, float] | None:
        """Seconds of each phase of its start; None when it was killed before it contributed."""
        if "contributing" not in self.moments_s:
            return None
        found, last_s = {}, self.started_s
        for kind, words in PHASES.items():
            found[words], last_s = self.moments_s[kind] - last_s, self.moments_s[kind]
        if self.state_s is not None:
            found[STATE] = self.state_s
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnSummary:
    """The results of all peers together in a window."""

    samples_per_s: float  # samples in the swarm's steps
    samples_per_peer_s: float  # the same per second in which a peer trains, without dead time and starts
    trained: float  # fraction of the window in which a peer trains, mean over the peers
    loss: float | None  # median of the last held-out losses of live peers
    restarts_s: tuple[float, ...]  # from a kill to the first sample that counts again
    unfinished: int  # restarts that ended before the first sample, by another kill or the end
    failed_rounds: int
    resynchronised: int


def summarize(
    lifetimes: Iterable[ProcessLifetime], *, peers: int, since_s: float, until_s: float
) -> ChurnSummary:
    """Summarize what the processes did between `since_s` and `until_s`."""
    everyone = list(lifetimes)
    window_s = until_s - since_s
    samples = sum(
        count for lifetime in everyone for at_s, count in lifetime.counted if since_s < at_s <= until_s
    )
    trained_s = sum(lifetime.contributing_s(since_s, until_s) for lifetime in everyone)
    restarted = [lifetime for lifetime in everyone if lifetime.restarted]
    last = [lifetime.losses[-1][1] for lifetime in everyone if lifetime.losses and lifetime.ended_s is None]
    restarts_s = tuple(
        lifetime.moments_s["contributing"] - lifetime.started_s
        for lifetime in restarted
        if "contributing" in lifetime.moments_s
    )
    return ChurnSummary(
        samples_per_s=samples / window_s,
        samples_per_peer_s=samples / trained_s if trained_s else 0.0,
        trained=trained_s / (peers * window_s),
        loss=statistics.median(last) if last else None,
        restarts_s=restarts_s,
        unfinished=len(restarted) - len(restarts_s),
        failed_rounds=sum(lifetime.failed_rounds for lifetime in everyone),
        resynchronised=sum(lifetime.resynchronised for lifetime in everyone),
    )
