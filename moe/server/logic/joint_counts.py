"""Counts of the samples that an expert, or its replicas together, have gathered for the next step of the
target batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarm.core.avoidance import Avoidance
from swarm.core.ids import PeerId

# a replica whose parameters differ from this one's for this long is left out: it may be hostile, or lost
_APART_S_MAX = 5.0
# One replica counts for at most this many target batches in a step. An honest one accepts no further passes
# once the batch is complete, and exceeds it by at most one request.
TARGETS_PER_REPLICA_MAX = 2
_STEPS_MAX = 8  # steps with one sum of gradients
# A replica that announced samples and did not bring them is not counted for this long; four times as long
# each further time, at most half a day.
_DISTRUST_S = 10.0
_DISTRUST_S_MAX = 4096 * _DISTRUST_S
_DISTRUST_GROWTH = 4.0
_GRAVE_FAILURES = 4  # one that brought invented gradients begins with the pause of the fourth time
_DISTRUSTED_MAX = 256


@dataclass(frozen=True, slots=True)
class BatchCount:
    """The progress of one replica towards its next step."""

    version: int  # version of the parameters that the gradients are for
    head: bytes  # name of their last common version; b"": there is none
    samples: int

    @property
    def basis(self) -> tuple[int, bytes]:
        """Return the key that is equal on replicas with equal parameters."""
        return self.version, self.head


class JointCounts:
    """The last counts of the replicas that answer."""

    def __init__(self) -> None:
        self._counts: dict[PeerId, BatchCount] = {}
        self._apart_since_s: dict[PeerId, float] = {}
        self._distrusted = Avoidance(
            pause_first_s=_DISTRUST_S,
            pause_s_max=_DISTRUST_S_MAX,
            growth=_DISTRUST_GROWTH,
            keys_max=_DISTRUSTED_MAX,
        )

    def note(self, peer: PeerId, count: BatchCount, now_s: float) -> None:
        """Record what a replica has said. One that is not trusted now is not counted."""
        if not self._distrusted.avoided(peer, now_s):
            self._counts[peer] = count

    def note_answer(self, peer: PeerId, count: BatchCount, before: BatchCount | None, now_s: float) -> None:
        """Record the answer of a replica that was asked when its last count was `before`. If it has sent one
        by itself since then, the two may arrive in either order, and the one that is further counts.
        """
        last = self.last(peer)
        if last is before or last is None or (last.version, last.samples) <= (count.version, count.samples):
            self.note(peer, count, now_s)

    def last(self, peer: PeerId) -> BatchCount | None:
        """Return the last count of a replica; None when it has sent none."""
        return self._counts.get(peer)

    def distrust(self, peers: Iterable[PeerId], now_s: float, *, gravely: bool = False) -> None:
        """Forget replicas, and do not count them for a while: they announced samples and brought fewer.
        `gravely`: they brought invented gradients, and their state must not be taken over soon either.
        """
        for peer in peers:
            self.forget(peer)
            self._distrusted.failed(peer, now_s, failures_min=_GRAVE_FAILURES if gravely else 1)

    def forget(self, peer: PeerId) -> None:
        """Forget a replica that has left or does not answer."""
        self._counts.pop(peer, None)
        self._apart_since_s.pop(peer, None)

    @property
    def peers(self) -> list[PeerId]:
        """Return the replicas that answer."""
        return list(self._counts)

    def together(self, own: BatchCount) -> list[PeerId]:
        """Return the replicas that gather for the same step as this one."""
        return [peer for peer, count in self._counts.items() if count.basis == own.basis]

    def samples(self, own: BatchCount, target: int) -> int:
        """Return how many samples all replicas have gathered for this one's next step of `target` samples,
        each of the others within its limit.
        """
        others = [self._counts[peer].samples for peer in self.together(own)]
        return own.samples + sum(min(count, TARGETS_PER_REPLICA_MAX * target) for count in others)

    def announced(self, own: BatchCount) -> dict[PeerId, int]:
        """Return the samples that each of the others has announced for this one's next step."""
        return {peer: self._counts[peer].samples for peer in self.together(own)}

    def apart(self, own: BatchCount, now_s: float) -> list[PeerId]:
        """Return the replicas with other parameters that may soon have the same ones: one of the two missed a
        step, or does not know of it yet.
        """
        apart = [peer for peer, count in self._counts.items() if count.basis != own.basis]
        self._apart_since_s = {peer: self._apart_since_s.get(peer, now_s) for peer in apart}
        return [peer for peer in apart if now_s - self._apart_since_s[peer] < _APART_S_MAX]

    def is_behind(self, own: BatchCount, now_s: float) -> bool:
        """Return whether some replica has later parameters than this one."""
        return any(self._counts[peer].version >= own.version for peer in self.apart(own, now_s))


@dataclass(frozen=True, slots=True)
class RoundVerdict:
    """The samples that the members of a committed round brought for a step. All members come to the same
    one, except for `unkept`, which depends on what this replica was told.
    """

    samples: int  # samples that count for the step
    excessive: frozenset[PeerId]  # members that claim more than a replica can have
    unkept: frozenset[PeerId]  # replicas that had announced more than they brought


def judge(
    counts: Mapping[PeerId, object],
    weights: Mapping[PeerId, float],
    announced: Mapping[PeerId, int],
    target: int,
) -> RoundVerdict:
    """Judge a round by what its certificate says. `counts` and `weights` are those of its members: samples
    that count for the step, and samples whose gradients are in the mean. `announced`: what this replica had
    been told before.
    """
    most = TARGETS_PER_REPLICA_MAX * target
    brought = {peer: one for peer, one in counts.items() if type(one) is int and one >= 0}
    excessive = {peer for peer in counts if peer not in brought or brought[peer] > most}
    excessive |= {peer for peer, weight in weights.items() if not weight <= most}
    unkept = {peer for peer, one in announced.items() if min(one, most) > brought.get(peer, 0)}
    return RoundVerdict(
        sum(one for peer, one in brought.items() if peer not in excessive),
        frozenset(excessive),
        frozenset(unkept),
    )


def steps_due(samples: int, target: int) -> tuple[int, int]:
    """Return how many steps a batch of this size is for, and how many of its samples count for the next step.
    It is more than one step where passes were admitted at the same moment, or are larger than the target. A
    batch is for at most 8 steps; of what is beyond them, at most one sample less than the target counts on.
    """
    steps = min(max(samples // target, 1), _STEPS_MAX) if target else 1
    return steps, min(max(samples - steps * target, 0), max(target - 1, 0))
