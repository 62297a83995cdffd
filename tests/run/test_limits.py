"""Limits of a volunteer (hours of the day, memory, pauses) and the decision that follows from them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from swarm.core.errors import SwarmError, UsageError
from swarm.run.hours import DAY_S, Hours
from swarm.run.limits import (
    CALM_S,
    Calm,
    Decision,
    MachineStatus,
    MachineUse,
    VolunteerLimits,
    decide,
    parse_duration_s,
    parse_size,
)

HOUR = 3600.0


def status(second_of_day: float = 12 * HOUR, memory_bytes: int = 0, **changes: Any) -> MachineStatus:
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
    assume(begin != end)
    hours = Hours.parse([f"{begin}-{end}"])
    wait_s = hours.opens_in_s(now)
    assert hours.open_at((now + wait_s) % DAY_S) or abs((now + wait_s) % HOUR) < 1e-6
    assert wait_s == 0 or not hours.open_at((now + wait_s / 2) % DAY_S)


@pytest.mark.parametrize(
    "text", ["", "22", "7-25", "9:60-12", "nine-five", "24:30-2", "-3-4", "5-5", "22:30-22:30"]
)
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
    assert "takes 2.0 MB of memory" in why
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
    assert [parse_size(text) for text in ("4G", "800m", "1.5GiB", "12B", "2 kB")] == [
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
    for wrong in ("", "G", "-1G", "0", "4X", "4", "800"):
        with pytest.raises(UsageError):
            parse_size(wrong)
    with pytest.raises(UsageError):
        parse_duration_s("soon")


@pytest.mark.parametrize(
    ("limits", "use", "said"),
    [
        (VolunteerLimits(), MachineUse(device_users=("blender",)), "blender computes on the device"),
        (VolunteerLimits(yields_gpu=False), MachineUse(device_users=("blender",)), ""),
        (VolunteerLimits(), MachineUse(on_battery=True), "on battery"),
        (VolunteerLimits(on_battery=True), MachineUse(on_battery=True), ""),
        (VolunteerLimits(), MachineUse(metered=True), "metered"),
        (VolunteerLimits(on_metered=True), MachineUse(metered=True), ""),
        (
            VolunteerLimits(temperature_c_max=80.0),
            MachineUse(temperature_c=81.0),
            "at 81 °C, of at most 80 °C",
        ),
        (VolunteerLimits(temperature_c_max=80.0), MachineUse(temperature_c=80.0), ""),
        (VolunteerLimits(), MachineUse(temperature_c=200.0, idle_s=0.0, other_load=1.0), ""),
        (VolunteerLimits(idle_s=300.0), MachineUse(idle_s=299.0), "somebody uses this machine"),
        (VolunteerLimits(idle_s=300.0), MachineUse(idle_s=301.0, other_load=0.2), ""),
        (
            VolunteerLimits(idle_s=300.0),
            MachineUse(other_load=0.3),
            "other programs use 30% of the processor",
        ),
        (VolunteerLimits(idle_s=300.0, temperature_c_max=80.0), MachineUse(), ""),
    ],
)
def test_what_disturbs_is_what_the_limits_say_and_nothing_that_is_not_known(
    limits: VolunteerLimits, use: MachineUse, said: str
) -> None:
    found = Calm().disturbance(limits, use, 0.0)
    assert said in found
    assert bool(said) == bool(found)


def test_a_volunteer_pauses_at_once_and_continues_when_the_machine_has_been_calm() -> None:
    calm, limits = Calm(), VolunteerLimits(temperature_c_max=80.0)

    def hot(temperature_c: float, now_s: float) -> bool:
        return bool(calm.disturbance(limits, MachineUse(temperature_c=temperature_c), now_s))

    assert [hot(79.0, 0.0), hot(80.5, 0.5), hot(78.0, 10.0)] == [False, True, True], "78 is not cooler yet"
    assert [hot(75.0, 20.0), hot(75.0, 9.9 + CALM_S), hot(75.0, 10.0 + CALM_S)] == [True, True, False]
    assert not hot(79.0, 11.0 + CALM_S)


def test_a_week_of_preferences_and_budgets_trains_when_it_may_and_never_beyond() -> None:
    """Simulate a week in steps of a minute: nights only, 2 GB a day and 9 GB a month, a person at the machine
    until one in the night, and a game on the GPU every third night from two to three.
    """
    limits = VolunteerLimits(
        hours=Hours.parse(["22-7"]), idle_s=600.0, daily_bytes_max=2 * 10**9, monthly_bytes_max=9 * 10**9
    )
    calm, trained, spent_month = Calm(), [0] * 7, 0
    reasons: set[str] = set()
    used_s = 0.0
    for day in range(7):
        spent_today = 0
        for minute in range(24 * 60):
            hour, now_s = minute / 60, (day * 24 * 60 + minute) * 60.0
            if hour < 1 or 8 <= hour < 23:
                used_s = now_s
            users = ("game",) if day % 3 == 0 and 2 <= hour < 3 else ()
            use = MachineUse(idle_s=now_s - used_s, device_users=users)
            decision, why = decide(
                limits,
                status(
                    minute * 60.0,
                    disturbance=calm.disturbance(limits, use, now_s),
                    bytes_today=spent_today,
                    bytes_this_month=spent_month,
                ),
            )
            if decision is Decision.TRAIN:
                assert hour < 7 or hour >= 22
                assert now_s - used_s >= 600
                assert not users
                assert spent_today < 2 * 10**9
                assert spent_month < 9 * 10**9
                trained[day] += 1
                spent_today += 10 * 10**6
                spent_month += 10 * 10**6
            else:
                assert decision is Decision.PAUSE
                reasons.add(why.partition(";")[0].partition(" of ")[0])
    assert trained == [200, 200, 200, 200, 100, 0, 0], "the day's budget, then the month's"
    assert reasons == {
        "outside",
        "somebody uses this machine",
        "game computes on the device",
        "this day's 2.0 GB",
        "this month's 9.0 GB",
    }
