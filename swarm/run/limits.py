"""What a volunteer allows its machine to be used for, and what follows from it at each moment. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from swarm.core.errors import SwarmError, UsageError
from swarm.run.hours import ALWAYS, Hours

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|)")


@dataclass(frozen=True, slots=True, kw_only=True)
class VolunteerLimits:
    """Set by the volunteer for its machine."""

    hours: Hours = ALWAYS  # of the day, local time; outside of them it does not train
    memory_bytes_max: int | None = None  # of this process; None: what the machine has

    def check(self, needed_bytes: int, run: str) -> None:
        """SwarmError when a run is expected to need more than is allowed."""
        if self.memory_bytes_max is not None and needed_bytes > self.memory_bytes_max:
            raise SwarmError(
                f"the run {run} needs about {needed_bytes / 1e6:,.0f} MB of memory, and --memory allows "
                f"{self.memory_bytes_max / 1e6:,.0f} MB: allow more, or volunteer for another run"
            )


class Decision(Enum):
    """What to do now."""

    TRAIN = "train"
    REST = "rest"  # stay in the run without training: its owner has paused it
    PAUSE = "pause"  # leave rounds and progress, keep the model in memory, and come back
    LEAVE = "leave"  # for good


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStatus:
    """What is known now."""

    second_of_day: float  # local time
    memory_bytes: int  # that this process takes
    asked_to_pause: bool = False  # by the volunteer
    run_paused: bool = False  # by the run's owner
    banned: bool = False  # this peer, by the run's owner


def decide(limits: VolunteerLimits, moment: MachineStatus) -> tuple[Decision, str]:
    """What to do at this moment, and why, in a sentence for people."""
    if moment.banned:
        return Decision.LEAVE, "the owner of this run has banned this peer"
    ceiling = limits.memory_bytes_max
    if ceiling is not None and moment.memory_bytes > ceiling:
        text = f"this process takes {moment.memory_bytes / 1e6:,.0f} MB of memory and --memory allows {ceiling / 1e6:,.0f} MB"
        return Decision.LEAVE, text
    if moment.asked_to_pause:
        return Decision.PAUSE, "asked to pause; `swarm resume` goes on"
    if not limits.hours.open_at(moment.second_of_day):
        waits_s = limits.hours.opens_in_s(moment.second_of_day)
        return Decision.PAUSE, f"outside of the hours {limits.hours}; going on in {waits_s / 3600:.1f} h"
    if moment.run_paused:
        return Decision.REST, "the owner of this run has paused it"
    return Decision.TRAIN, ""


def parse_size(text: str) -> int:
    """Bytes from `4G`, `800M`, `1.5GiB`; UsageError otherwise."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"a size is written like 4G or 800M, not {text!r}")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))


def parse_duration_s(text: str) -> float:
    """Seconds from `90s`, `10m`, `2h`; 0 is never. UsageError otherwise."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"a duration is written like 90s, 10m or 2h, not {text!r}")
    return float(match[1]) * {"h": 3600.0, "m": 60.0}.get(match[2], 1.0)
