"""`swarm dashboard` of an invited run: members, invites, and changes that volunteers follow."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from swarm.cli.commands import swarm
from swarm.cli.dashboard import OwnerConsole
from swarm.cli.invite import owners_entries
from swarm.core.errors import UsageError
from swarm.core.files import write_private
from swarm.core.identity import Identity
from swarm.monitor.watching import Watch, WatchConfig
from swarm.run import events
from swarm.run.changes import Change
from swarm.run.specification_store import SpecificationStore
from tests.wire.volunteers import VolunteerThread, created_run


def test_an_owner_sees_members_and_invites_and_changes_the_run_by_keys(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path))
    with created_run(members="invited") as (node, owner, signed):
        SpecificationStore(tmp_path / "runs").save(signed)
        write_private(tmp_path / "identity", owner.encode())
        invited = CliRunner().invoke(swarm, ["invite", "tiny", "--from", node.addresses[0], "--uses", "3"])
        assert invited.exit_code == 0, invited.output
        one = VolunteerThread(node, signed, new=True, data=texts)
        one.wait(events.Contributed)

        command = ["dashboard", "tiny", "--from", node.addresses[0], "--once"]
        result = CliRunner().invoke(swarm, [*command, "--json"])
        assert result.exit_code == 0, result.output
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        kinds = [line["event"] for line in lines]
        assert kinds == ["run", "member", "invite"]
        assert lines[0]["id"] == signed.run_id
        assert (lines[1]["peer_id"], "owner" in lines[1]["roles"]) == (str(node.peer_id), True)
        assert (lines[2]["uses"], lines[2]["used"], lines[2]["revoked"]) == (3, 0, False)
        text = CliRunner().invoke(swarm, command).stdout
        assert "0 of 3" in text
        assert "to volunteers: nothing" in text

        own = Identity.generate()
        entries = tuple(owners_entries("tiny", node.addresses[:1], owner, own.peer_id))
        with Watch(WatchConfig(entry=entries, run="tiny"), own) as watch:
            with pytest.raises(UsageError, match=r"belongs to .*: watch it with `swarm monitor`"):
                OwnerConsole(watch, Identity.generate())
            console = OwnerConsole(watch, owner)
            said = console.change(console.change_for("message", "", "Thank you all!"))
            assert said == "its owner says: Thank you all!; 1 of 1 members follow it already"
            place = one.wait(events.RunChanged, lambda event: "Thank you all!" in str(event.changes))
            assert console.look().view.run.message == "Thank you all!"
            assert one.volunteer.describe_run(created=False).message == "Thank you all!"
            assert "control characters" in console.change(Change(message="a\x1b[31m"))
            assert "has these settings already" in console.change(Change(message="Thank you all!"))

            now_s = time.time()
            console.change(Change(pauses=((now_s - 5.0, now_s + 3600.0),)))
            place = one.wait(events.Paused, since=place)
            assert console.look().view.run.paused
            console.change(Change(pauses=()))
            one.wait(events.Resumed, since=place)
            console.change(console.change_for("pause", "", ""))
            place = one.wait(events.Paused, since=place + 1)
            invite = lines[2]["subject"]
            assert "1 invite or peer is revoked" in console.change(console.change_for("revoke", invite, ""))
            assert invite in console.look().revoked
            console.change(console.change_for("end", "", ""))
        assert one.end().reason == "the run's owner ended it"
