"""The file of what a person allows: reading, writing, what differs for one run, and changes while a
volunteer runs.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm.core.errors import UsageError
from swarm.run.preferences import LivePreferences, Preferences, PreferencesFile, parse_preference


def written(folder: Path, text: str) -> PreferencesFile:
    file = PreferencesFile(folder / "preferences.toml")
    file.path.write_text(text, encoding="utf-8")
    return file


def test_a_run_says_only_what_differs_and_an_option_comes_first(tmp_path: Path) -> None:
    file = written(tmp_path, 'hours = "22-7"\ndaily = "5G"\nbattery = true\n[run.bytelm]\ndaily = "1G"\n')
    limits = file.for_run("bytelm").limits()
    assert (str(limits.hours), limits.daily_bytes_max, limits.on_battery) == ("22:00-07:00", 10**9, True)
    assert file.for_run("other").limits().daily_bytes_max == 5 * 10**9
    option = Preferences(daily="2G", battery=False)
    assert option.over(file.for_run("bytelm")).limits().daily_bytes_max == 2 * 10**9
    assert not option.over(file.for_run("bytelm")).limits().on_battery
    assert PreferencesFile(tmp_path / "none.toml").for_run("bytelm") == Preferences()


def test_what_is_changed_is_read_again_for_any_name_of_a_run(tmp_path: Path) -> None:
    file = PreferencesFile(tmp_path / "new" / "preferences.toml")
    name = 'a "b" \\ [x]\n\u00e9'
    file.change(None, {"hours": "22-7", "temperature": 80.0, "battery": True}, [])
    file.change(name, {"daily": "1G", "cpu": 12.5}, [])
    file.change(None, {}, ["hours"])
    everywhere, runs = file.read()
    assert everywhere == Preferences(temperature=80.0, battery=True)
    assert runs == {name: Preferences(daily="1G", cpu=12.5)}
    assert file.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('dayly = "5G"', "dayly is not a known key"),
        ('daily = "5X"', "daily: a size is written like 4G or 800M, not '5X'"),
        ('hours = "9-25"', "hours are from 0:00 to 24:00, like 22-7 or 9:30-12, not '9-25'"),
        ("cpu = 0", "cpu must be greater than 0"),
        ("temperature = nan", "temperature"),
        ('[run.bytelm]\ngpu = "never"', "[run.bytelm] gpu must be one of 'yield' or 'share', not 'never'"),
        ("run = 3", "[run.NAME]"),
        ("= 3", "preferences.toml"),
        ("\x00", "preferences.toml"),
    ],
)
def test_a_file_that_cannot_be_understood_is_named_with_what_is_wrong(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(UsageError) as raised:
        written(tmp_path, text).read()
    assert said in str(raised.value)
    assert "preferences.toml" in str(raised.value)


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("dayly", "5G", "'dayly' is not a preference; these exist: hours"),
        ("daily", "x", "daily: a size is written like 4G or 800M, not 'x'"),
        ("cpu", "much", "cpu is a number, not 'much'"),
        ("cpu", "120%", "cpu must be less than or equal to 100"),
        ("battery", "maybe", "battery must be true or false, not 'maybe'"),
        ("when_idle", "sometimes", "a duration is written like 90s"),
        ("name", "two\nlines", "name: a name is one line, without control characters, not 'two"),
    ],
)
def test_a_wrong_value_is_refused_with_its_key(key: str, text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_preference(key, text)
    assert said in str(raised.value)


def test_values_are_read_as_people_type_them() -> None:
    assert parse_preference("battery", "yes") is True
    assert parse_preference("cpu", "50%") == 50.0
    assert Preferences(when_idle="on").limits().idle_s == 300.0
    assert Preferences(when_idle="10m").limits().idle_s == 600.0
    assert Preferences(when_idle="off").limits().idle_s == 0.0
    assert Preferences(upload=8.0).bandwidth().up_bytes_per_s == 1e6


def test_a_change_applies_at_once_and_an_invalid_one_is_reported_once_without_effect(tmp_path: Path) -> None:
    file = written(tmp_path, 'daily = "5G"\n')
    live = LivePreferences(file, "bytelm", Preferences(cpu=50.0))
    assert not live.changed()
    written(tmp_path, 'daily = "6G"\ncpu = 10\n')
    assert live.changed() == "daily 6G"
    assert (live.now.daily, live.now.cpu) == ("6G", 50.0)
    written(tmp_path, "daily = ")
    with pytest.raises(UsageError):
        live.changed()
    assert not live.changed()
    assert live.now.daily == "6G"
    os.unlink(file.path)
    assert live.changed() == "no daily any more"
    assert live.now == Preferences(cpu=50.0)
