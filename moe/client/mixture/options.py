"""Options and report of a mixture layer's pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe.client.logic.gathering import GatherTimeouts
from moe.protocol.calls import UNCOMPRESSED, WireCodecs, check_staleness_max
from moe.protocol.names import ExpertGrid
from swarm.core.errors import UsageError

# Rounds of asking replacements for samples that lost too many experts. From the second round on, avoided
# experts are asked as well. Too small: samples fail although experts are alive; too large: a step waits for
# the last of them
REPLACEMENTS_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOptions:
    """The limits of a pass, and the number of answers that it must give."""

    grid: ExpertGrid
    k_best: int
    k_min: int
    backward_k_min: int
    forward_timeout_s: float
    backward_timeout_s: float
    gather_timeouts: GatherTimeouts
    allow_zero_outputs: bool
    codecs: WireCodecs = UNCOMPRESSED
    staleness_max: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.k_best <= self.grid.count:
            raise UsageError(
                f"k_best is from 1 to the {self.grid.count} experts that {self.grid} may have, "
                f"not {self.k_best}"
            )
        if not (0 <= self.k_min <= self.k_best and 0 <= self.backward_k_min <= self.k_best):
            raise UsageError(
                f"k_min and backward_k_min are from 0 to k_best, {self.k_best}: "
                f"not {self.k_min} and {self.backward_k_min}"
            )
        check_staleness_max(self.staleness_max)
        if not (0.0 < self.forward_timeout_s < float("inf") and 0.0 < self.backward_timeout_s < float("inf")):
            raise UsageError("forward_timeout_s and backward_timeout_s are positive numbers of seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """The outcome of a pass, for users' logs and for tests."""

    asked: tuple[str, ...]  # names of experts, one for each call
    answered: tuple[str, ...]
    failed: dict[str, str]  # name -> reason, for experts that were asked and did not answer
    short_samples: int  # samples with fewer than k_min answers
    seconds: float
    # backward: expert's name -> number of versions by which it changed since the forward pass (negative:
    # versions were lost)
    versions_apart: dict[str, int] = field(default_factory=dict)
