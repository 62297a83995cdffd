"""Snapshots of the progress of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.core.ids import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProgress:
    """One peer in a snapshot: its own report, and how much of it counts."""

    epoch: int
    samples: int
    samples_per_s: float
    counted: float  # samples that count towards this epoch now; 0 for a peer in another epoch
    age_s: float
    has_standing: bool = True  # False: a stranger, whose report is displayed and counts for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """A snapshot of the progress for people and programs: `opt.progress`."""

    epoch: int
    swarm_epoch: int
    samples: float  # counted over the swarm
    target: int
    samples_per_s: float
    peers: dict[PeerId, PeerProgress]  # this peer included; in a run of several shards those of its own
    peers_total: int = 0  # in the whole run

    @property
    def fraction(self) -> float:
        """Return the reached fraction of the target, at most 1."""
        return min(1.0, self.samples / self.target)

    @property
    def eta_s(self) -> float:
        """Return the seconds until the epoch is full; infinity while nobody trains."""
        missing = max(0.0, self.target - self.samples)
        return missing / self.samples_per_s if self.samples_per_s > 0 else (math.inf if missing else 0.0)
