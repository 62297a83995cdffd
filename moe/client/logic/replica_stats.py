"""What this peer knows of the peers that hold experts: how long they take, how much they are doing for us,
who fails.

A pure machine, shared by all layers of a node. A replica is one expert at one peer. Failures of the network
are the peer's, so that its other experts are avoided as well; refusals and answers that cannot be used are
the replica's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moe.client.logic.avoidance import Avoidance, AvoidanceConfig
from moe.client.logic.hedging import HedgeBudget, HedgingConfig
from swarm.core.errors import UsageError
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    import random

_Place = tuple[str, PeerId]  # (the expert's name, who holds it)
_SLOW = ""  # in the place of an expert's name: the peer as a whole dawdles


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """How peers that hold experts are judged."""

    avoidance: AvoidanceConfig = field(default_factory=AvoidanceConfig)
    hedging: HedgingConfig = field(default_factory=HedgingConfig)
    fading: float = 0.2  # weight of the newest call in the mean of a replica's times
    # a replica is asked in proportion to the power of 1 / its expected time; 0: evenly, large: always the
    # fastest
    eagerness: float = 2.0
    wait_young_s: float = 5.0  # how long a peer's word about its queue outweighs its declaration
    replicas_max: int = 10_000  # whose times are remembered

    def __post_init__(self) -> None:
        if not (0.0 < self.fading <= 1.0 and self.eagerness >= 0.0 and self.replicas_max >= 1):
            raise UsageError(
                "a fleet needs a fading above 0 and at most 1, eagerness of at least 0, replicas_max of at least 1"
            )


@dataclass(slots=True)
class _Pace:
    mean_s: float
    deviation_s: float


class ReplicaStats:
    """`now_s` is any clock that never jumps; `rng` draws whom to ask among equals."""

    def __init__(self, rng: random.Random, config: FleetConfig | None = None) -> None:
        self.config = config or FleetConfig()
        self.budget = HedgeBudget(self.config.hedging)
        self._rng = rng
        self._avoidance = Avoidance(self.config.avoidance)
        self._paces: OrderedDict[_Place, _Pace] = OrderedDict()
        self._in_flight: dict[PeerId, int] = {}
        self._waits: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()  # what it said, and when

    def available(self, uid: str, peers: Iterable[PeerId], now_s: float) -> list[PeerId]:
        """Who may be asked for this expert now."""
        avoided = self._avoidance.avoided
        return [peer for peer in peers if not avoided(peer, now_s) and not avoided((uid, peer), now_s)]

    def untried(self, uid: str, peers: Iterable[PeerId], since_s: float) -> list[PeerId]:
        """Who has not failed since then, avoided or not."""
        failed = self._avoidance.failed_since
        return [peer for peer in peers if not failed(peer, since_s) and not failed((uid, peer), since_s)]

    def order(
        self, uid: str, peers: Sequence[PeerId], now_s: float, loads_s: Sequence[float] | None = None
    ) -> list[PeerId]:
        """The available ones, in the order in which to ask them: drawn by how long each is expected to take.

        `loads_s`: for each of `peers` how long a request waits there by its own account, 0 when it gives
        none; what it said with its last answer counts instead, while that is young. Who was overtaken of late
        comes last, for a while as with failures; and after that, until it answers, while it has something of
        ours to do already, or there is no second request left that could save a try.
        """
        waits = dict(zip(peers, loads_s or [0.0] * len(peers), strict=True))
        for peer in peers:
            wait_s, said_s = self._waits.get(peer, (0.0, float("-inf")))
            if now_s - said_s < self.config.wait_young_s:
                waits[peer] = wait_s
        left = self.available(uid, peers, now_s)
        ordered = []
        while len(left) > 1:
            weights = [
                (1.0 / max(self.expected_s(uid, peer) + waits[peer], 1e-6)) ** self.config.eagerness
                for peer in left
            ]
            mark = self._rng.random() * sum(weights)
            place = 0
            while place < len(left) - 1 and mark >= weights[place]:
                mark -= weights[place]
                place += 1
            ordered.append(left.pop(place))
        return sorted(ordered + left, key=lambda peer: self._dawdles(peer, now_s))

    def expected_s(self, uid: str, peer: PeerId) -> float:
        """How long a call would take: its calls of late, times what is in flight there already. Who is new
        counts as quick, to be tried.
        """
        pace = self._paces.get((uid, peer))
        known = pace.mean_s if pace is not None and pace.mean_s > 0.0 else self.config.hedging.least_s
        return known * (1 + self._in_flight.get(peer, 0))

    def hedge_after_s(self, uid: str, peer: PeerId) -> float:
        """After how long a second replica is asked as well."""
        hedging, pace = self.config.hedging, self._paces.get((uid, peer))
        if pace is None or pace.mean_s <= 0.0:
            return hedging.first_s
        return max(hedging.least_s, pace.mean_s + hedging.deviations * pace.deviation_s)

    def begin(self, peer: PeerId) -> None:
        """A call goes out; `end` must follow."""
        self._in_flight[peer] = self._in_flight.get(peer, 0) + 1

    def end(self, peer: PeerId) -> None:
        left = self._in_flight.get(peer, 0) - 1
        if left > 0:
            self._in_flight[peer] = left
        else:
            self._in_flight.pop(peer, None)

    def answered(self, uid: str, peer: PeerId, seconds: float) -> None:
        """A forward call gave what can be used, after so long."""
        self._avoidance.succeeded(peer)
        self._avoidance.succeeded((uid, peer))
        if seconds <= self.hedge_after_s(uid, peer):
            self._avoidance.succeeded((_SLOW, peer))
        pace = self._paces.get((uid, peer))
        if pace is None:
            # the first call may have had to connect: half of it may be chance
            self._paces[uid, peer] = _Pace(seconds, seconds / 2.0)
            if len(self._paces) > self.config.replicas_max:
                self._paces.popitem(last=False)
            return
        fading = self.config.fading
        pace.deviation_s += fading * (abs(seconds - pace.mean_s) - pace.deviation_s)
        pace.mean_s += fading * (seconds - pace.mean_s)
        self._paces.move_to_end((uid, peer))

    def said(self, peer: PeerId, wait_s: float, now_s: float) -> None:
        """With an answer it said how long the next request would wait."""
        self._waits[peer] = (wait_s, now_s)
        self._waits.move_to_end(peer)
        if len(self._waits) > self.config.replicas_max:
            self._waits.popitem(last=False)

    def unreachable(self, peer: PeerId, now_s: float, why: str) -> None:
        """The network failed it: nothing there is asked for a while."""
        self._avoidance.failed(peer, now_s, why)

    def failed(self, uid: str, peer: PeerId, now_s: float, why: str) -> None:
        """It refused, was late, or gave what cannot be used."""
        self._avoidance.failed((uid, peer), now_s, why)

    def overtaken(self, uid: str, peer: PeerId, now_s: float) -> None:
        """Another replica, asked later, answered before it. Slowness is the whole peer's: where there is a
        choice, others come first.
        """
        self._avoidance.failed((_SLOW, peer), now_s, "it was overtaken")
        self.failed(uid, peer, now_s, "it was overtaken by another replica")

    def full(self, peer: PeerId, now_s: float) -> None:
        """Its queue takes no more: nothing is held against it, but where there is a choice others come first
        for a while.
        """
        self._avoidance.failed((_SLOW, peer), now_s, "its queue was full")

    def _dawdles(self, peer: PeerId, now_s: float) -> bool:
        key = (_SLOW, peer)
        if self._avoidance.avoided(key, now_s) or not self._avoidance.failures(key):
            return self._avoidance.avoided(key, now_s)
        # it may be tried: by one call at a time, and by no more peers' calls than could be hedged
        tried = sum(self._avoidance.failures((_SLOW, other)) > 0 for other in self._in_flight)
        return peer in self._in_flight or not self.budget.affords(tried + 1)

    def why_avoided(self, uid: str, peer: PeerId, now_s: float) -> str | None:
        """What is held against a replica now, in words; None when nothing is."""
        for key in (peer, (uid, peer)):
            if self._avoidance.avoided(key, now_s):
                return self._avoidance.why(key)
        return None
