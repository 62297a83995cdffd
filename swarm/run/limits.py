"""Limits that a volunteer sets for its machine, and the decision to train, pause or leave that follows from
them. Pure functions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from swarm.core.errors import SwarmError, UsageError
from swarm.core.wording import size
from swarm.run.hours import ALWAYS, Hours

CALM_S = 30.0  # quiet time before a paused volunteer trains again
LOAD_MAX = 0.25  # with `--when-idle`: share of all cores that other programs may use
COOLER_C = 5.0  # a hot device must cool to this much below the limit before training continues
IDLE_S = 300.0  # idle time of `--when-idle` if the user gives none

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|)")


@dataclass(frozen=True, slots=True, kw_only=True)
class VolunteerLimits:
    """Limits that the volunteer sets for its machine."""

    hours: Hours = ALWAYS  # local time; the volunteer trains only in these hours
    memory_bytes_max: int | None = None  # limit for this process; None: no limit
    idle_s: float = 0.0  # train only while nobody has used the machine for this time; 0: always
    yields_gpu: bool = True  # pause while another program computes on the device
    on_battery: bool = False  # train on battery, too
    on_metered: bool = False  # train over a metered connection, too
    temperature_c_max: float | None = None  # highest temperature of device and processor; None: no limit
    processor_share: float = 1.0  # share of all cores to use, above 0 and at most 1
    daily_bytes_max: int | None = None  # sent and received by this user's volunteers; None: no limit
    monthly_bytes_max: int | None = None

    def check(self, needed_bytes: int, run: str) -> None:
        """Raise SwarmError if the run is expected to need more memory than allowed."""
        if self.memory_bytes_max is not None and needed_bytes > self.memory_bytes_max:
            raise SwarmError(
                f"the run {run} needs about {size(needed_bytes)} of memory, and --memory allows "
                f"{size(self.memory_bytes_max)}: allow more, or volunteer for another run"
            )


class Decision(Enum):
    """The action of a volunteer: train, or one of several kinds of pause."""

    TRAIN = "train"
    REST = "rest"  # stay a member without training, because the owner has paused the run
    PAUSE = "pause"  # leave the run for a while, and free the memory of an accelerator
    LEAVE = "leave"  # end the command


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineUse:
    """Other uses of this machine. None means unknown; an unknown value never pauses a volunteer."""

    idle_s: float | None = None  # since a person last used keyboard, mouse or terminal
    other_load: float | None = None  # share of all cores that other programs use, 0 to 1
    device_users: tuple[str, ...] = ()  # other programs that compute on the device
    on_battery: bool | None = None
    metered: bool | None = None
    temperature_c: float | None = None  # the highest of device and processor


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStatus:
    """The state of machine and run on which a decision is based."""

    second_of_day: float  # local time
    memory_bytes: int  # resident set of this process
    asked_to_pause: bool = False  # the volunteer ran `swarm pause`
    run_paused: bool = False  # the owner has paused the run
    banned: bool = False  # the owner has banned this peer
    not_invited: str = ""  # why this peer may not take part any more; empty if it may
    disturbance: str = ""  # as `Calm.disturbance` returns it
    bytes_today: int = 0  # sent and received by this user's volunteers since midnight
    bytes_this_month: int = 0


def decide(limits: VolunteerLimits, status: MachineStatus) -> tuple[Decision, str]:
    """Return what to do now, and the reason as a sentence for the user (empty for TRAIN)."""
    if status.banned:
        return Decision.LEAVE, "the owner of this run has banned this peer"
    if status.not_invited:
        return Decision.LEAVE, status.not_invited
    ceiling = limits.memory_bytes_max
    if ceiling is not None and status.memory_bytes > ceiling:
        text = f"this process takes {size(status.memory_bytes)} of memory and --memory allows {size(ceiling)}"
        return Decision.LEAVE, text
    if status.asked_to_pause:
        return Decision.PAUSE, "asked to pause; `swarm resume` continues"
    if not limits.hours.open_at(status.second_of_day):
        wait_s = limits.hours.opens_in_s(status.second_of_day)
        return Decision.PAUSE, f"outside of the hours {limits.hours}; continues in {wait_s / 3600:.1f} h"
    for spent, budget, span, end in (
        (status.bytes_this_month, limits.monthly_bytes_max, "month", "on the first"),
        (status.bytes_today, limits.daily_bytes_max, "day", "at midnight"),
    ):
        if budget is not None and spent >= budget:
            return Decision.PAUSE, f"this {span}'s {size(budget)} of traffic are used up; continues {end}"
    if status.disturbance:
        return Decision.PAUSE, status.disturbance
    if status.run_paused:
        return Decision.REST, "the owner of this run has paused it"
    return Decision.TRAIN, ""


class Calm:
    """Decides whether other activity on the machine pauses the volunteer. To avoid frequent changes, a pause
    lasts until the machine has been quiet for `CALM_S`.
    """

    def __init__(self) -> None:
        self._reason = ""
        self._disturbed_s = float("-inf")

    def disturbance(self, limits: VolunteerLimits, use: MachineUse, now_s: float) -> str:
        """Return why to pause now, as a sentence for the user; empty if the volunteer may train. `now_s` is
        the time of a monotonic clock.
        """
        reason = _disturbance(limits, use, paused=bool(self._reason))
        if reason:
            self._reason, self._disturbed_s = reason, now_s
        elif self._reason and now_s - self._disturbed_s >= CALM_S:
            self._reason = ""
        return self._reason


def _disturbance(limits: VolunteerLimits, use: MachineUse, *, paused: bool) -> str:
    if limits.yields_gpu and use.device_users:
        return f"{', '.join(use.device_users)} computes on the device; continues when it is free"
    if not limits.on_battery and use.on_battery:
        return "this machine runs on battery; continues when it is plugged in"
    if not limits.on_metered and use.metered:
        return "the connection is metered; continues with another one"
    limit_c, hottest_c = limits.temperature_c_max, use.temperature_c
    if limit_c is not None and hottest_c is not None and hottest_c > limit_c - (COOLER_C if paused else 0.0):
        return f"at {hottest_c:.0f} °C, of at most {limit_c:g} °C; continues when it is cooler"
    if limits.idle_s > 0.0:
        if use.idle_s is not None and use.idle_s < limits.idle_s:
            return f"somebody uses this machine; continues when nobody has for {limits.idle_s / 60:.0f} min"
        if use.other_load is not None and use.other_load > LOAD_MAX:
            return f"other programs use {use.other_load:.0%} of the processor; continues when they are quiet"
    return ""


def parse_size(text: str) -> int:
    """Return the number of bytes that `4G`, `800M` or `1.5GiB` means. Raise UsageError for other texts, also
    for numbers without a unit: `--memory 4` means four gigabytes to those who type it.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"a size is written like 4G or 800M, not {text!r}")
    if match[1] == text.strip():
        raise UsageError(f"a size is written with its unit, like 4G or 800M, not {text!r}")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))


def parse_duration_s(text: str) -> float:
    """Return the seconds that `90s`, `10m`, `2h` or `7d` means. Raise UsageError for other texts."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"a duration is written like 90s, 10m, 2h or 7d, not {text!r}")
    return float(match[1]) * {"d": 86400.0, "h": 3600.0, "m": 60.0}.get(match[2], 1.0)
