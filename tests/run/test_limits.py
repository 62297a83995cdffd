"""Limits of a volunteer (hours of the day, memory, pauses) and the decision that follows from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.core.errors import SwarmError, UsageError
from swarm.run.hours import DAY_S, Hours
from swarm.run.limits import Decision, MachineStatus, VolunteerLimits, decide, parse_duration_s, parse_size

HOUR = 3600.0


def status(second_of_day: float = 12 * HOUR, memory_bytes: int = 0, **changes: bool) -> MachineStatus:
    return MachineStatus(second_of_day=second_of_day, memory_bytes=memory_bytes, **changes)


def test_hours_over_midnight_and_several() -> None:
    night = Hours.parse(["22-7"])
    assert [night.open_at(hour * HOUR) for hour in (21.99, 22, 23.9, 0, 6.99, 7, 12)] == [
        False,
        True,
        True,
        True,
        True,
        False,
        False,
    ]
    assert night.opens_in_s(7 * HOUR) == 15 * HOUR
    assert night.opens_in_s(23 * HOUR) == 0.0
    several = Hours.parse(["9:30-12,14-18", "22-24"])
    assert [several.open_at(hour * HOUR) for hour in (9.4, 9.5, 12, 13, 14, 18, 23, 0)] == [
        False,
        True,
        False,
        False,
        True,
        False,
        True,
        False,
    ]
    assert several.opens_in_s(12 * HOUR) == 2 * HOUR
    assert str(several) == "09:30-12:00, 14:00-18:00, 22:00-00:00"
    assert Hours.parse([]).open_at(0)
    assert Hours.parse(["0-24"]).open_at(5 * HOUR)


@given(st.integers(0, 23), st.integers(0, 23), st.floats(0, DAY_S - 1))
def test_hours_open_exactly_when_they_say(begin: int, end: int, now: float) -> None:
    hours = Hours.parse([f"{begin}-{end}"])
    wait_s = hours.opens_in_s(now)
    assert hours.open_at((now + wait_s) % DAY_S) or abs((now + wait_s) % HOUR) < 1e-6
    assert wait_s == 0 or not hours.open_at((now + wait_s / 2) % DAY_S)


@pytest.mark.parametrize("text", ["", "22", "7-25", "9:60-12", "nine-five", "24:30-2", "-3-4"])
def test_texts_that_are_no_hours_are_usage_errors(text: str) -> None:
    with pytest.raises(UsageError):
        Hours.parse([text])


def test_decisions_over_a_day_follow_hours_pauses_and_memory() -> None:
    """Check every minute of a day: a requested pause and the memory limit take precedence over the hours."""
    limits = VolunteerLimits(hours=Hours.parse(["22-7"]), memory_bytes_max=1000)
    decisions = [decide(limits, status(minute * 60.0))[0] for minute in range(24 * 60)]
    assert decisions.count(Decision.TRAIN) == 9 * 60
    assert set(decisions) == {Decision.TRAIN, Decision.PAUSE}
    assert decide(limits, status(23 * HOUR, asked_to_pause=True))[0] is Decision.PAUSE
    assert decide(limits, status(23 * HOUR, run_paused=True))[0] is Decision.REST
    assert decide(limits, status(12 * HOUR, run_paused=True))[0] is Decision.PAUSE, (
        "outside of its hours it is no donor either"
    )
    say, why = decide(limits, status(12 * HOUR, memory_bytes=2_000_000))
    assert say is Decision.LEAVE
    assert "takes 2 MB of memory" in why
    assert decide(limits, status(banned=True))[0] is Decision.LEAVE


def test_a_run_that_needs_more_memory_than_is_allowed_is_refused_before_it_begins() -> None:
    limits = VolunteerLimits(memory_bytes_max=parse_size("400M"))
    limits.check(399_000_000, "tiny")
    with pytest.raises(
        SwarmError, match=r"needs about 429 MB of memory, and --memory allows 400 MB: allow more"
    ):
        limits.check(428_505_088, "tiny")
    VolunteerLimits().check(1 << 50, "huge")


def test_sizes_and_durations_with_units_are_parsed() -> None:
    assert [parse_size(text) for text in ("4G", "800m", "1.5GiB", "12", "2 kB")] == [
        4 * 10**9,
        800 * 10**6,
        3 << 29,
        12,
        2000,
    ]
    assert [parse_duration_s(text) for text in ("90s", "10m", "2h", "0", "5")] == [
        90.0,
        600.0,
        7200.0,
        0.0,
        5.0,
    ]
    for wrong in ("", "G", "-1G", "0", "4X"):
        with pytest.raises(UsageError):
            parse_size(wrong)
    with pytest.raises(UsageError):
        parse_duration_s("soon")
