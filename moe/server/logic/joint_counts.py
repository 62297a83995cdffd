"""Counts of the samples that the replicas of an expert have gathered for their next joint step."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.core.ids import PeerId

# a replica whose parameters stay others' than ours this long is left out: it may be hostile, or lost
_APART_S_MAX = 5.0


@dataclass(frozen=True, slots=True)
class BatchCount:
    """The progress of one replica towards its next step."""

    version: int  # of the parameters that the gradients are for
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

    def note(self, peer: PeerId, count: BatchCount) -> None:
        """Record a replica's count."""
        self._counts[peer] = count

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

    def samples(self, own: BatchCount) -> int:
        """Return the number of samples that all replicas have gathered for this one's next step."""
        others = [count.samples for count in self._counts.values() if count.basis == own.basis]
        return own.samples + sum(others)

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
