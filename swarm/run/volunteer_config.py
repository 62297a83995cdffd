"""The choices of a volunteer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.run.checkpoints import CheckpointConfig
from swarm.run.contributions import ContributionLog
from swarm.run.limits import VolunteerLimits
from swarm.run.machine_use import MachineProbes

if TYPE_CHECKING:
    import torch

    from swarm.run.rank_volunteers import LeadingRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class VolunteerConfig:
    """The choices of a volunteer, made on the command line. Those of the run are in its specification."""

    # a name that `swarm.core.device.resolve_device` accepts: auto, cpu, cuda, cuda:N or mps
    device: str = "auto"
    data: Path | None = None  # a folder to train on instead of the task's default data
    # Both functions are called about twice a second. `limits` returns the current limits; it raises
    # UsageError once after a change that is not valid.
    limits: Callable[[], VolunteerLimits] = VolunteerLimits
    asked_to_pause: Callable[[], str] = str  # "pause"; "free" to free the memory at once, too; else ""
    checkpoints: CheckpointConfig | None = None  # None: no checkpoints
    ranks: LeadingRanks | None = None  # the other processes of this peer; None: there are none
    # Reads other uses of the machine; None: they are ignored.
    probes: Callable[[torch.device], MachineProbes] | None = None
    log: ContributionLog | None = None  # records this user's contributions
