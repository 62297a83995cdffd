"""Statistics about the peers that host experts: how long they take, how many of this peer's calls they are
working on, and which ones fail.

Pure logic, shared by all layers of a node. A replica is one expert at one peer. Network failures count
against the peer, so its other experts are avoided as well; refusals and unusable answers count against the
replica only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from moe.client.logic.hedging import (
    DELAY_S_INITIAL,
    DELAY_S_MIN,
    HedgeBudget,
)
from swarm.core.avoidance import Avoidance
from swarm.core.delays import DelayEstimate
from swarm.core.ids import PeerId

if TYPE_CHECKING:
    import random

_ReplicaKey = tuple[str, PeerId]  # (the expert's name, its host)
_SLOW = ""  # used as the expert's name for marks against a peer that is slow as a whole
_SMOOTHING = 0.2  # weight of the newest call in the mean of a replica's answer times
_REPORTED_WAIT_TTL_S = 5.0  # how long a reported wait overrides the declared one


# A replica is drawn with probability in proportion to (1 / expected time) to this power. 0: uniformly; large:
# always the fastest, which all requests then make slow
SELECTION_EXPONENT = 2.0
REPLICAS_MAX = 10_000  # replicas whose answer times are remembered


class ReplicaStats:
    """Records the results of calls and orders replicas by them. `now_s` is a time of any clock that never
    jumps; `rng` draws among replicas.
    """

    def __init__(
        self,
        rng: random.Random,
        budget: HedgeBudget | None = None,
        *,
        selection_exponent: float = SELECTION_EXPONENT,
        replicas_max: int = REPLICAS_MAX,
    ) -> None:
        self.budget = budget or HedgeBudget()
        self._selection_exponent, self._replicas_max = selection_exponent, replicas_max
        self._rng = rng
        self._avoidance = Avoidance()
        self._latencies: OrderedDict[_ReplicaKey, DelayEstimate] = OrderedDict()
        self._in_flight: dict[PeerId, int] = {}
        self._waits: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()  # reported wait, and when

    def available(self, uid: str, peers: Iterable[PeerId], now_s: float) -> list[PeerId]:
        """Return the peers that may be asked for this expert now."""
        avoided = self._avoidance.avoided
        return [peer for peer in peers if not avoided(peer, now_s) and not avoided((uid, peer), now_s)]

    def not_failed_since(self, uid: str, peers: Iterable[PeerId], since_s: float) -> list[PeerId]:
        """Return the peers that have not failed since `since_s`, avoided or not."""
        failed = self._avoidance.failed_since
        return [peer for peer in peers if not failed(peer, since_s) and not failed((uid, peer), since_s)]

    def order(
        self, uid: str, peers: Sequence[PeerId], now_s: float, declared_waits_s: Sequence[float] | None = None
    ) -> list[PeerId]:
        """Return the available peers in the order in which to ask them, drawn by how long each is expected to
        take.

        `declared_waits_s` holds for each of `peers` how long a request waits there by its declaration, 0 when
        it declares none. The wait that came with the peer's last answer counts instead while it is recent. A
        peer that was slow lately comes last, for a while as after failures. After that, until it answers
        in time, it still comes last while it is working on another call of this peer, or while the hedging
        budget has no second request left that could rescue the attempt.
        """
        waits = dict(zip(peers, declared_waits_s or [0.0] * len(peers), strict=True))
        for peer in peers:
            wait_s, reported_s = self._waits.get(peer, (0.0, float("-inf")))
            if now_s - reported_s < _REPORTED_WAIT_TTL_S:
                waits[peer] = wait_s
        left = self.available(uid, peers, now_s)
        ordered = []
        while len(left) > 1:
            weights = [
                (1.0 / max(self.expected_s(uid, peer) + waits[peer], 1e-6)) ** self._selection_exponent
                for peer in left
            ]
            mark = self._rng.random() * sum(weights)
            place = 0
            while place < len(left) - 1 and mark >= weights[place]:
                mark -= weights[place]
                place += 1
            ordered.append(left.pop(place))
        return sorted(ordered + left, key=lambda peer: self._is_deprioritized(peer, now_s))

    def expected_s(self, uid: str, peer: PeerId) -> float:
        """Return how long a call is expected to take: the mean of recent calls, times the number of calls
        there including this one. An unknown replica counts as quick, so that it is tried.
        """
        latency = self._latencies.get((uid, peer))
        known = latency.mean_s if latency is not None and latency.mean_s > 0.0 else DELAY_S_MIN
        return known * (1 + self._in_flight.get(peer, 0))

    def hedge_after_s(self, uid: str, peer: PeerId) -> float:
        """Return the time after which a second replica is asked as well."""
        latency = self._latencies.get((uid, peer))
        if latency is None or latency.mean_s <= 0.0:
            return DELAY_S_INITIAL
        return max(DELAY_S_MIN, latency.rarely_exceeded_s)

    def begin(self, peer: PeerId) -> None:
        """Record that a call is sent. `end` must follow."""
        self._in_flight[peer] = self._in_flight.get(peer, 0) + 1

    def end(self, peer: PeerId) -> None:
        """Record that a call is over."""
        left = self._in_flight.get(peer, 0) - 1
        if left > 0:
            self._in_flight[peer] = left
        else:
            self._in_flight.pop(peer, None)

    def answered(self, uid: str, peer: PeerId, seconds: float) -> None:
        """Record a forward call that gave a usable answer after `seconds`."""
        self._avoidance.succeeded(peer)
        self._avoidance.succeeded((uid, peer))
        if seconds <= self.hedge_after_s(uid, peer):
            self._avoidance.succeeded((_SLOW, peer))
        latency = self._latencies.get((uid, peer))
        if latency is None:
            self._latencies[uid, peer] = DelayEstimate.of_first(seconds)
            if len(self._latencies) > self._replicas_max:
                self._latencies.popitem(last=False)
            return
        latency.observe(seconds, _SMOOTHING)
        self._latencies.move_to_end((uid, peer))

    def wait_reported(self, peer: PeerId, wait_s: float, now_s: float) -> None:
        """Record the waiting time that a peer reported with an answer."""
        self._waits[peer] = (wait_s, now_s)
        self._waits.move_to_end(peer)
        if len(self._waits) > self._replicas_max:
            self._waits.popitem(last=False)

    def unreachable(self, peer: PeerId, now_s: float, reason: str) -> None:
        """Record a network failure: no expert of this peer is asked for a while."""
        self._avoidance.failed(peer, now_s, reason)

    def failed(self, uid: str, peer: PeerId, now_s: float, reason: str) -> None:
        """Record that a replica refused, was late, or gave an unusable answer."""
        self._avoidance.failed((uid, peer), now_s, reason)

    def slow(self, uid: str, peer: PeerId, now_s: float, reason: str) -> None:
        """Record that another replica, asked later, answered first, or that a call was given up. Slowness is
        attributed to the whole peer: where there is a choice, other peers come first.
        """
        self._avoidance.failed((_SLOW, peer), now_s, reason)
        self.failed(uid, peer, now_s, reason)

    def overloaded(self, peer: PeerId, now_s: float) -> None:
        """Record that a peer's queue is full. It is not avoided, but where there is a choice other peers come
        first for a while.
        """
        self._avoidance.failed((_SLOW, peer), now_s, "its queue was full")

    def _is_deprioritized(self, peer: PeerId, now_s: float) -> bool:
        """Return whether a peer comes last because it was slow or full."""
        key = (_SLOW, peer)
        if self._avoidance.avoided(key, now_s) or not self._avoidance.failures(key):
            return self._avoidance.avoided(key, now_s)
        # slow peers are tried by one call at a time, and by no more calls than could be hedged
        busy_slow_peers = sum(self._avoidance.failures((_SLOW, other)) > 0 for other in self._in_flight)
        return peer in self._in_flight or not self.budget.can_afford(busy_slow_peers + 1)

    def why_avoided(self, uid: str, peer: PeerId, now_s: float) -> str | None:
        """Return why a replica is avoided now; None when it is not."""
        for key in (peer, (uid, peer)):
            if self._avoidance.avoided(key, now_s):
                return self._avoidance.reason(key)
        return None
