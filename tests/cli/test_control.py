"""Running commands announce themselves in files and can be asked to pause."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from swarm.cli import main
from swarm.cli.control import Control


def test_a_running_command_can_be_paused_and_leaves_no_files(tmp_path: Path) -> None:
    control = Control(tmp_path / "live")
    assert control.running() == []
    with control.announced("tiny", "a" * 20, "12D3KooWx", ["/ip4/127.0.0.1/tcp/1"]):
        [one] = control.running()
        assert one.pid == os.getpid()
        for wanted in (None, "tiny", "tiny@" + "a" * 20, "a" * 20, "12D3KooWx", str(os.getpid())):
            assert one.matches(wanted)
        assert not one.matches("other")
        assert not control.asked_to_pause()
        control.set_paused(one, True)
        assert control.asked_to_pause()
        control.set_paused(one, False)
        assert not control.asked_to_pause()
        control.set_paused(one, True)
    assert list((tmp_path / "live").iterdir()) == [], "nothing is left, not even the request"


def test_files_of_dead_commands_and_invalid_files_are_deleted(tmp_path: Path) -> None:
    control = Control(tmp_path)
    dead = {
        "pid": os.getpid(),
        "started_s": 5.0,
        "name": "tiny",
        "run_id": "b",
        "peer_id": "p",
        "addresses": [],
    }
    (tmp_path / f"{os.getpid()}.json").write_text(json.dumps(dead))
    (tmp_path / "77.json").write_text("no json")
    (tmp_path / "78.json").write_text("{}")
    assert control.running() == []
    assert list(tmp_path.iterdir()) == []


def test_pause_fails_when_nothing_trains_and_works_when_something_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    assert main(["pause"]) == 1
    assert "nothing trains on this machine" in capsys.readouterr().err
    with Control(tmp_path / "live").announced("tiny", "a" * 20, "12D3KooWx", []):
        assert main(["pause", "tiny", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["event"] == "pause"
        assert Control(tmp_path / "live").asked_to_pause()
        assert main(["resume"]) == 0
        assert "resuming: tiny@" in capsys.readouterr().out
        assert main(["change", "tiny", "--pause"]) == 2, "an identity is needed, and there is none"
    assert main(["export", "tiny", "-o", str(tmp_path / "x")]) == 1
    assert "took part in no run yet" in capsys.readouterr().err


def test_a_server_of_experts_is_found_and_cannot_be_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    control = Control(tmp_path / "live")
    with control.announced("grid.ffn", "a" * 20, "12D3KooWx", ["/ip4/127.0.0.1/tcp/1"], trains=False):
        [one] = control.running()
        assert one.matches("grid.ffn")
        assert not control.processes()
        assert main(["pause"]) == 1
        assert "nothing trains on this machine" in capsys.readouterr().err
