"""Results of `Optimizer.step` and `Optimizer.load_state_from_peers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from averaging.result import RoundResult
from swarm.core.ids import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Result of fetching the state. If not `loaded`, nothing was changed, and `reason` says why, in a
    sentence.
    """

    loaded: bool
    epoch: int  # this peer's, afterwards
    reason: str = ""
    alone: bool = False  # not loaded because there is nobody to load from
    donors: Mapping[PeerId, int] = field(default_factory=dict)  # bytes from each
    failures: Mapping[PeerId, str] = field(default_factory=dict)  # who did not do its part, and why
    digest: str = ""  # hex, of the downloaded state
    canonical: bool = False  # that state was the output of an averaging round
    replayed: int = 0  # epochs that the swarm completed during the download, made up for here
    bytes_received: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Result of one call of `Optimizer.step`."""

    epoch: int  # this peer's, afterwards
    stepped: bool  # the epoch was completed and the parameters moved
    # accepted in this call; on CUDA, gradients that are not finite are found later, and count in a later
    # `dropped`
    samples: int
    accumulated: int  # of this peer in its present epoch, afterwards
    contributed: int = 0  # of this peer in the epoch that was completed
    dropped: int = 0  # samples that were thrown away in this call, of this call or of earlier ones
    reason: str = ""  # why something was dropped, or a round failed; "" when all went as it should
    progress: float = 0.0  # fraction of the target that the swarm has reached, in this peer's view
    alone: bool = False  # stepped without a round: no other peer lives
    round: RoundResult | None = None  # of the gradients; failed ones too
    rounds_failed: int = 0  # in this call
    state_round: RoundResult | None = None  # when the state was averaged: its digest is equal on all members
    drift: float | None = None  # then: how far this peer's parameters were from the average, relative norm
    resynchronised: LoadResult | None = None  # the swarm was ahead: the state was fetched anew
    loss: Any = None  # what the closure returned
    seconds: float = 0.0  # in this call

    @property
    def samples_total(self) -> int:
        """Return this peer's samples of the completed epoch, else of the present one."""
        return self.contributed or self.accumulated
