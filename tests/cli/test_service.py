"""`swarm service`: systemd and launchd accept the files that it writes, and mistakes are reported."""

from __future__ import annotations

import json
import plistlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from swarm.cli.commands import swarm
from swarm.cli.service import agent, unit
from swarm.core.identity import Identity
from swarm.membership.invite import RunIdentity, Terms, make_invite


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("SWARM_HOME", raising=False)
    monkeypatch.setattr("swarm.cli.service._program", lambda: "/opt/my swarm/bin/swarm")
    return tmp_path


def service(*arguments: str) -> Result:
    return CliRunner().invoke(swarm, ["service", *arguments])


def an_invite() -> str:
    owner = Identity.generate()
    terms = Terms(roles=("train",), uses=1, lifetime_s=3600.0)
    return make_invite(RunIdentity(owner.peer_id, "bytelm", None), owner, (), terms, now_s=time.time()).text()


def test_status_without_services_says_how_to_install_one() -> None:
    assert "swarm service install INVITE" in service("status").output


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="units of systemd are for Linux")
def test_a_service_is_named_after_the_run_of_its_invite_which_only_its_user_can_read(home: Path) -> None:
    invite = an_invite()
    result = service("install", invite, "--when-idle", "--no-start")
    assert result.exit_code == 0, result.output
    file = home / ".config" / "systemd" / "user" / "swarm-bytelm.service"
    assert file.stat().st_mode & 0o777 == 0o600
    command = f'ExecStart="/opt/my swarm/bin/swarm" "join" "{invite}" "--when-idle" "--yes"'
    assert command in file.read_text().splitlines()
    assert "replaced" in service("install", invite, "--no-start", "--as", "bytelm").output


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
@pytest.mark.parametrize("word", ["plain", 'a "b" %h $HOME \\n \u00e9', "new\nline"])
def test_systemd_accepts_the_unit_with_any_words(tmp_path: Path, word: str) -> None:
    file = tmp_path / "swarm-test.service"
    file.write_text(unit("bytelm", ["/bin/echo", word]), encoding="utf-8")
    verified = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(file)],
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (verified.returncode, verified.stderr) == (0, "")


def test_an_agent_of_launchd_is_a_property_list_with_the_command(home: Path) -> None:
    table = plistlib.loads(agent("net.swarm-train.bytelm", ["/bin/swarm", "join", "a & <b>"]))
    assert table["ProgramArguments"] == ["/bin/swarm", "join", "a & <b>"]
    assert table["StandardOutPath"] == str(home / "Library" / "Logs" / "swarm-bytelm.log")
    assert table["KeepAlive"] == {"SuccessfulExit": False}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["install", "bytelm", "--bogus"], "--bogus"),
        (["install", "bytelm", "--daily", "x"], "a size is written like 4G"),
        (["install", "/ip4/127.0.0.1/tcp/1/tls/http/p2p/12D3"], "an address does not name a run"),
        (["install", "bytelm", "--as", "a/b", "--no-start"], "letters, digits, dots"),
        (["install", "bytelm"], "this machine took part in no run 'bytelm'"),
        (["remove"], "no service is installed"),
        (["logs", "--as", "other"], "there is no service 'other'"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_written(home: Path, arguments: list[str], said: str) -> None:
    result = service(*arguments)
    assert result.exit_code != 0
    assert said in (str(result.exception) + result.output)
    assert not list(home.rglob("*.service"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="units of systemd are for Linux")
def test_one_of_several_services_is_chosen_by_its_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], *, check: bool = True) -> str:
        asked.append(command)
        return "active"

    monkeypatch.setattr("swarm.cli.service._run", run)
    assert service("install", an_invite()).exit_code == 0
    assert service("install", an_invite(), "--as", "second").exit_code == 0
    assert ["systemctl", "--user", "restart", "swarm-second.service"] in asked
    assert service("status").output.split() == ["active", "active"]
    found = [json.loads(line) for line in service("status", "--json").output.splitlines()]
    assert [one["status"].strip() for one in found] == ["active", "active"]
    assert len({one["name"] for one in found}) == 2
    assert "--as bytelm or --as second" in str(service("remove").exception)
    assert service("remove", "--as", "second").exit_code == 0
    assert [file.name for file in home.rglob("*.service")] == ["swarm-bytelm.service"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="units of systemd are for Linux")
@pytest.mark.parametrize(
    "said",
    [
        "Failed to connect to bus: No medium found",
        "Failed to connect to user scope bus via local transport: No medium found",
    ],
)
def test_without_a_session_of_the_user_the_command_says_what_was_done_and_what_to_do(
    home: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", f"{said}\n")
    monkeypatch.setattr("swarm.cli.service.subprocess.run", lambda *_, **__: failed)
    text = str(service("install", an_invite()).exception)
    assert "swarm-bytelm.service is written, but the service was not started" in text
    assert "log in, on the machine or by ssh" in text
    asked = service("status")
    assert (asked.exit_code, asked.output) == (1, "")
    assert "swarm-bytelm.service is installed, but its status is not known" in str(asked.exception)
    assert "log in, on the machine or by ssh" in str(asked.exception)
