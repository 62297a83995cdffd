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
    epoch: int  # epoch of this peer after the call
    reason: str = ""
    alone: bool = False  # not loaded because no other peer takes part in the run
    donors: Mapping[PeerId, int] = field(default_factory=dict)  # bytes from each donor
    failures: Mapping[PeerId, str] = field(default_factory=dict)  # donors that failed, with the reason
    digest: str = ""  # hex, of the downloaded state
    canonical: bool = False  # the state was the output of an averaging round
    # accumulated samples that do not count in the loaded epoch; those of a step are also in the step's
    # `dropped`
    dropped: int = 0
    replayed: int = 0  # epochs that the swarm completed during the download and this peer replayed
    bytes_received: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Result of one call of `Optimizer.step`."""

    epoch: int  # epoch of this peer after the call
    stepped: bool  # the epoch was completed and the parameters changed
    # accepted in this call; on CUDA, gradients that are not finite are found later and count in a later
    # `dropped`
    samples: int
    accumulated: int  # samples of this peer in its present epoch, after the call
    # this peer's samples in the completed epoch's average; `round.weights` has their weights
    contributed: int = 0
    dropped: int = 0  # samples dropped in this call, of this call or of earlier ones
    # why samples were dropped or a round failed, or what the caller should change; "": no problem
    reason: str = ""
    progress: float = 0.0  # fraction of the target that the swarm has reached, in this peer's view
    alone: bool = False  # stepped without a round: no other peer is live
    round: RoundResult | None = None  # over the mode's tensors; failed ones too
    rounds_failed: int = 0  # in this call
    # over the state, when it was due: its digest is equal on all members
    state_round: RoundResult | None = None
    # distance of this peer's parameters from the average of that round, as a relative norm
    drift: float | None = None
    # own epochs that this peer discarded, because its history had parted from the swarm's while it was cut
    # off
    epochs_given_up: int = 0
    resynchronised: LoadResult | None = None  # the swarm was ahead: the state was downloaded
    loss: Any = None  # returned by the closure
    seconds: float = 0.0  # in this call


def hidden_reason(others: int) -> str:
    """Return why no state can be downloaded in a run whose `others` nobody can call, as a sentence."""
    who = "1 other peer trains" if others == 1 else f"{others} other peers train"
    return (
        f"{who} this run, and none of them can be called, so that nobody can give the state: one of them "
        "needs a port that others can connect to (docs/howto/ports.md)"
    )
