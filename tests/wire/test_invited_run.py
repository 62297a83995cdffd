"""A run for invited peers from its creation on: joining by invite, strangers, and a revoked volunteer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarm.cli import main
from swarm.cli.paths import default_identity
from swarm.core.errors import UsageError
from swarm.membership.invite import Invite
from swarm.node import Node
from swarm.run import events
from swarm.run.changes import Change, send_version, sign_change
from swarm.run.directory import RunDirectory
from swarm.run.membership import check_invited
from tests.wire.volunteers import HERE, VolunteerThread, created_run

pytestmark = pytest.mark.usefixtures("home")


def test_a_run_is_joined_by_invite_closed_to_strangers_and_left_when_revoked(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with created_run(members="invited") as (node, owner, signed), Node([node.entry], listen=HERE) as other:
        assert other.wait_joined(10)
        found = other.network.run(RunDirectory(other.dht.service, clock=other.clock).find(None))
        assert found == signed
        one = VolunteerThread(node, signed, new=True, data=texts)
        two = VolunteerThread(other, found, new=False, data=texts)
        two.wait(events.EpochDone, lambda event: event.peers == 2)
        nobody = "/ip4/127.0.0.1/tcp/9/tls/http/p2p/12D3KooWJ3bWs8GcGA4bPX8nfUeJGFAcgoMYEpx5HyNNdUHeEdE3"
        for _ in range(2):  # the entrance of this peer takes one use, however often it looks
            assert main(["monitor", nobody, node.entry, other.entry, "--once", "--json"]) == 0
            assert f'"run_id": "{signed.run_id}"' in capsys.readouterr().out
        default_identity().parent.mkdir(exist_ok=True)
        default_identity().write_bytes(owner.encode())
        default_identity().chmod(0o600)
        assert main(["change", "tiny", "--pause", "--from", node.addresses[0]]) == 1
        assert "pass one of its invites: --from swarm1…" in capsys.readouterr().err
        joined = two.events[two.wait(events.Joined)]
        assert isinstance(joined, events.Joined)
        assert joined.join_line == f"swarm join {other.entry}"
        for command in (["join", "--yes"], ["monitor", "--once"]):
            assert main([command[0], node.addresses[0], *command[1:]]) == 1
            sentence = capsys.readouterr().err
            assert f"run {signed.run_id} is for invited peers only: a peer joins with an invite" in sentence
            assert sentence.count("\n") == 1
        invite = Invite.parse(node.entry)
        changed = sign_change(signed, Change(revoke=(invite.text(),)), owner)
        assert changed.specification.revoked_peers == {invite.subject}
        following = node.network.run(send_version(node.channels, changed, [other.contact]), 10.0)
        assert following == {other.peer_id: 2}
        assert two.end().reason == "the owner of the run has revoked this peer's invite"
        publish = RunDirectory(node.dht.service, clock=node.clock).publish(changed)
        node.network.run(publish, 10.0)
        place = one.wait(events.EpochDone, lambda event: event.peers == 1)
        one.wait(events.EpochDone, since=place + 1)
        one.stop.set()
        one.end()


def test_a_revoked_peer_is_refused_by_the_members_that_follow_the_new_version(texts: Path) -> None:
    with created_run(members="invited") as (node, owner, signed):
        one = VolunteerThread(node, signed, new=True, data=texts)
        one.wait(events.EpochDone)
        invite = Invite.parse(node.entry)
        with Node([invite.text()], listen=HERE) as guest:
            assert guest.wait_joined(10)
            changed = sign_change(signed, Change(revoke=(str(guest.peer_id),)), owner)
            assert guest.network.run(send_version(guest.channels, changed, [node.contact]), 10.0)
            one.wait(events.RunChanged, lambda event: event.changes == ["1 invite or peer is revoked"])
            assert not guest.network.run(send_version(guest.channels, changed, [node.contact]), 10.0)
        one.stop.set()
        one.end()


def test_a_process_without_an_invite_or_with_one_to_another_run_takes_no_part() -> None:
    with created_run(members="invited") as (node, _, signed), Node(listen=None) as stranger:
        with pytest.raises(UsageError, match="is for invited peers only: join with an invite"):
            check_invited(signed, stranger.membership)
        check_invited(signed, node.membership)
        with pytest.raises(UsageError, match="this invite is to tiny@"):
            check_invited(replace(signed, owner=stranger.peer_id), node.membership)
