"""`swarm config` and the options of `swarm join` that say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swarm.cli.commands import swarm
from swarm.cli.preferences import given_preferences
from swarm.cli.train import join
from swarm.run.preferences import Preferences


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    return tmp_path


def config(*arguments: str) -> Result:
    return CliRunner().invoke(swarm, ["config", *arguments])


def test_preferences_are_set_shown_and_forgotten(home: Path) -> None:
    assert config("daily=5G", "when-idle=on").exit_code == 0
    assert config("--run", "bytelm", "cpu=50%").exit_code == 0
    shown = config().stdout
    assert str(home / "preferences.toml") in shown
    assert "daily       5G" in shown
    assert "for the run bytelm:" in shown
    told = json.loads(config("--unset", "daily", "--json").stdout)
    assert told["preferences"] == {"when_idle": "on"}
    assert told["runs"] == {"bytelm": {"cpu": 50.0}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["daily"], "set with KEY=VALUE"),
        (["dayly=5G"], "'dayly' is not a preference"),
        (["daily=x"], "a size is written like 4G"),
        (["--unset", "dayly"], "'dayly' is not a preference"),
    ],
)
def test_a_mistake_is_a_sentence_and_changes_nothing(home: Path, arguments: list[str], said: str) -> None:
    result = config(*arguments)
    assert said in str(result.exception)
    assert not (home / "preferences.toml").exists()


def test_options_of_join_say_what_the_file_can_say() -> None:
    options = ["--when-idle", "--daily", "5G", "--battery", "--no-metered", "--gpu", "share", "--cpu", "50"]
    parsed = join.make_context(
        "join", ["bytelm", *options, "--upload", "20", "--hours", "22-7", "--hours", "9-12,14-15"]
    )
    assert given_preferences(parsed.params) == Preferences(
        when_idle="on",
        daily="5G",
        battery=True,
        metered=False,
        gpu="share",
        cpu=50.0,
        upload=20.0,
        hours="22-7,9-12,14-15",
    )
    assert not Preferences.model_fields.keys() & parsed.params.keys()


def test_a_preference_without_a_value_is_forgotten_and_a_name_is_that_of_the_machine(home: Path) -> None:
    assert config("name=kitchen", "daily=5G").exit_code == 0
    assert config("--run", "bytelm", "daily=1G").exit_code == 0
    refused = config("--run", "bytelm", "name=bedroom")
    assert "name is the same for all runs of this machine" in str(refused.exception)
    told = json.loads(config("name=", "--json").stdout)
    assert told["preferences"] == {"daily": "5G"}
    told = json.loads(config("--run", "bytelm", "daily=", "--json").stdout)
    assert (told["preferences"], told["runs"]) == ({"daily": "5G"}, {})
    assert "'dayly' is not a preference" in str(config("dayly=").exception)
