"""Limits that a volunteer sets for its machine, and the decision to train, pause or leave that follows from
them. Pure functions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from swarm.core.errors import SwarmError, UsageError
from swarm.run.hours import ALWAYS, Hours

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|)")


@dataclass(frozen=True, slots=True, kw_only=True)
class VolunteerLimits:
    """Limits that the volunteer sets for its machine."""

    hours: Hours = ALWAYS  # local time; the volunteer trains only in these hours
    memory_bytes_max: int | None = None  # of this process; None: no limit

    def check(self, needed_bytes: int, run: str) -> None:
        """Raise SwarmError if the run is expected to need more memory than allowed."""
        if self.memory_bytes_max is not None and needed_bytes > self.memory_bytes_max:
            raise SwarmError(
                f"the run {run} needs about {needed_bytes / 1e6:,.0f} MB of memory, and --memory allows "
                f"{self.memory_bytes_max / 1e6:,.0f} MB: allow more, or volunteer for another run"
            )


class Decision(Enum):
    """The action of a volunteer: train, or one of several kinds of pause."""

    TRAIN = "train"
    REST = "rest"  # stay a member without training, because the owner has paused the run
    PAUSE = "pause"  # leave the run for a while and keep the model in memory
    LEAVE = "leave"  # end the command


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStatus:
    """The state of machine and run on which a decision is based."""

    second_of_day: float  # local time
    memory_bytes: int  # resident set of this process
    asked_to_pause: bool = False  # the volunteer ran `swarm pause`
    run_paused: bool = False  # the owner has paused the run
    banned: bool = False  # the owner has banned this peer
    not_invited: str = ""  # why this peer may not take part any more; empty if it may


def decide(limits: VolunteerLimits, status: MachineStatus) -> tuple[Decision, str]:
    """Return what to do now, and the reason as a sentence for the user (empty for TRAIN)."""
    if status.banned:
        return Decision.LEAVE, "the owner of this run has banned this peer"
    if status.not_invited:
        return Decision.LEAVE, status.not_invited
    ceiling = limits.memory_bytes_max
    if ceiling is not None and status.memory_bytes > ceiling:
        text = (
            f"this process takes {status.memory_bytes / 1e6:,.0f} MB of memory "
            f"and --memory allows {ceiling / 1e6:,.0f} MB"
        )
        return Decision.LEAVE, text
    if status.asked_to_pause:
        return Decision.PAUSE, "asked to pause; `swarm resume` goes on"
    if not limits.hours.open_at(status.second_of_day):
        wait_s = limits.hours.opens_in_s(status.second_of_day)
        return Decision.PAUSE, f"outside of the hours {limits.hours}; going on in {wait_s / 3600:.1f} h"
    if status.run_paused:
        return Decision.REST, "the owner of this run has paused it"
    return Decision.TRAIN, ""


def parse_size(text: str) -> int:
    """Return the number of bytes that `4G`, `800M` or `1.5GiB` means. Raise UsageError for other texts."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"a size is written like 4G or 800M, not {text!r}")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))


def parse_duration_s(text: str) -> float:
    """Return the seconds that `90s`, `10m`, `2h` or `7d` means. Raise UsageError for other texts."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"a duration is written like 90s, 10m, 2h or 7d, not {text!r}")
    return float(match[1]) * {"d": 86400.0, "h": 3600.0, "m": 60.0}.get(match[2], 1.0)
