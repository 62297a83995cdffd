"""`swarm recover` in a run for invited peers, whose founder's key is in other hands."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from swarm.cli import main
from swarm.cli.control import Control
from swarm.cli.paths import control_folder, specifications_folder
from swarm.core.identity import Identity
from swarm.node import Node
from swarm.run import events
from swarm.run.changes import Change, send_version, sign_change
from swarm.run.directory import RunDirectory
from swarm.run.specification_store import SpecificationStore
from tests.wire.volunteers import HERE, VolunteerThread, created_run

pytestmark = pytest.mark.usefixtures("home")


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """Run a command that succeeds, and return its result."""
    code = main([*arguments, "--json"])
    output = capsys.readouterr()
    assert code == 0, output.err
    result: dict[str, object] = json.loads(output.out)
    return result


def made(path: Path) -> Identity:
    """Make an identity file, and return the identity."""
    with contextlib.closing(Identity.load(path)):
        return Identity.read(path)


@pytest.mark.parametrize("reached_by", ["invite", "address", "volunteer on this machine"])
def test_an_invited_run_follows_its_new_owner_who_invites_while_the_thief_is_refused(
    reached_by: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recovery, successor = made(tmp_path / "recovery"), made(tmp_path / "successor")
    keys = ["--recovery-key", str(tmp_path / "recovery"), "--identity", str(tmp_path / "successor")]
    with (
        created_run(members="invited", recovery_key=str(recovery.peer_id)) as (thief, owner, signed),
        Node([thief.entry], listen=HERE) as first,
        Node([thief.entry], listen=HERE) as second,
    ):
        assert first.wait_joined(10)
        assert second.wait_joined(10)
        one = VolunteerThread(first, signed, new=True, data=texts)
        two = VolunteerThread(second, signed, new=False, data=texts)
        two.wait(events.EpochDone, lambda event: event.peers == 2)

        if reached_by != "invite":  # no member gives this command an invite: the recovery key lets it in
            SpecificationStore(specifications_folder()).save(signed)
        given = {"invite": ["--from", first.entry], "address": ["--from", first.entries[0]]}
        with Control(control_folder()).announced(
            signed.name, signed.run_id, str(first.peer_id), first.entries
        ):
            recovered = answered(capsys, "recover", "tiny", *keys, *given.get(reached_by, []))
        assert recovered["owner"] == str(successor.peer_id)
        sentence = f"the recovery key made {successor.peer_id} its owner"
        for volunteer in (one, two):
            volunteer.wait(events.RunChanged, lambda event: sentence in event.changes)

        last = sign_change(signed, Change(ended=True), owner)
        sending = send_version(thief.channels, last, [first.contact, second.contact])
        assert last.version not in thief.network.run(sending, 10.0).values()

        invited = answered(capsys, "invite", "tiny", *keys[2:], "--from", first.entry)
        with Node([str(invited["invite"])], listen=HERE) as third:
            assert third.wait_joined(10)
            directory = RunDirectory(third.dht.service, clock=third.clock)
            found = third.network.run(directory.find(None), 30.0)
            assert found.owner == successor.peer_id
            three = VolunteerThread(third, found, new=False, data=texts)
            three.wait(events.EpochDone, lambda event: event.peers == 3)
            for volunteer in (one, two, three):
                volunteer.stop.set()
                volunteer.end()
