"""Two volunteers on real sockets: the owner changes the run, one pauses or is banned, one resumes a
checkpoint, and a run uses PowerSGD.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from averaging.optim.optimizer import Optimizer
from swarm.core.identity import Identity
from swarm.node import Node
from swarm.run import events
from swarm.run.changes import Change, send_version, sign_change
from swarm.run.checkpoints import CheckpointConfig
from swarm.run.directory import RunDirectory
from swarm.run.estimate import read_members, round_bytes
from swarm.run.exporting import export, newest_checkpoint
from swarm.run.recovery import recover
from swarm.run.signed import VERSION_MAX, SignedSpecification, sign
from swarm.run.task import make_task
from tests.wire.volunteers import HERE, VolunteerThread, created_run


def publish_to_members(node: Node, signed: SignedSpecification) -> SignedSpecification:
    """Publish a version as `swarm change` does, from another node."""
    with Node(bootstrap=node.addresses, listen=HERE) as visitor:
        assert visitor.wait_joined(10)
        directory = RunDirectory(visitor.dht.service, clock=visitor.clock)
        visitor.network.run(directory.publish(signed), 30.0)
        contacts = visitor.network.run(read_members(visitor.dht.service, signed.run_id, visitor.clock), 10.0)
        following = visitor.network.run(send_version(visitor.channels, signed, contacts), 10.0)
    assert set(following.values()) <= {signed.version}
    assert following
    return signed


def check_banned_peer_is_refused(node: Node, signed: SignedSpecification) -> None:
    """Check that a banned peer cannot download the state or report progress, even if it ignores the ban."""
    parameter = torch.nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([parameter], lr=0.1)
    with Optimizer(
        inner, node=node, run=signed.run_id, target_batch_size=8, batch_size_per_step=8
    ) as stubborn:
        loaded = stubborn.load_state_from_peers(timeout_s=2)
        assert not loaded.loaded
        assert "banned" in str(loaded.failures) or "banned" in loaded.reason or not stubborn.contacts()


def test_the_owner_changes_pauses_bans_and_ends_a_running_run(texts: Path) -> None:
    with created_run() as (node, owner, signed), Node(bootstrap=node.addresses, listen=HERE) as other:
        assert other.wait_joined(10)
        one = VolunteerThread(node, signed, new=True, data=texts)
        one.wait(events.Contributed)
        two = VolunteerThread(other, signed, new=False, data=texts)
        two.wait(events.Contributed)
        signed = publish_to_members(node, sign_change(signed, Change(target_batch_size=48), owner))
        for trained in (one, two):
            place = trained.wait(events.RunChanged, lambda event: event.version == 2)
            trained.wait(events.EpochDone, since=place)
            assert trained.volunteer.training is not None
            assert trained.volunteer.training.optimizer.progress.target == 48
        signed = publish_to_members(node, sign_change(signed, Change(paused=True), owner))
        two.wait(events.Paused, lambda event: event.member)
        place = one.wait(events.Paused, lambda event: event.member)
        signed = publish_to_members(node, sign_change(signed, Change(paused=False), owner))
        place = one.wait(events.Resumed, since=place)
        one.wait(events.EpochDone, lambda event: event.peers == 2, since=place)
        signed = publish_to_members(node, sign_change(signed, Change(ban=(str(other.peer_id),)), owner))
        assert two.end().reason == "the owner of this run has banned this peer"
        place = one.wait(events.RunChanged, lambda event: event.version == 5)
        place = one.wait(events.EpochDone, since=place)
        check_banned_peer_is_refused(other, signed)
        assert one.volunteer.training is not None
        assert list(one.volunteer.training.optimizer.progress.peers) == [node.peer_id]
        one.wait(events.EpochDone, lambda event: event.peers in (0, 1), since=place + 1)
        signed = publish_to_members(node, sign_change(signed, Change(ended=True), owner))
        assert one.end().reason == "the run's owner ended it"


def test_version_that_comes_while_a_volunteer_has_left_for_a_pause_holds_when_it_continues(
    texts: Path,
) -> None:
    with created_run() as (node, owner, signed):
        one = VolunteerThread(node, signed, new=True, data=texts)
        one.wait(events.Contributed)
        one.asked = "pause"
        place = one.wait(events.Paused, lambda event: not event.member)
        changed = sign_change(signed, Change(target_batch_size=48), owner)
        with Node(bootstrap=node.addresses, listen=HERE) as visitor:
            assert visitor.wait_joined(10)
            told = visitor.network.run(send_version(visitor.channels, changed, [node.contact]), 10.0)
        assert told == {node.peer_id: 2}
        one.asked = ""
        place = one.wait(events.Resumed, since=place)
        one.wait(events.EpochDone, since=place)
        assert one.volunteer.training is not None
        assert one.volunteer.training.optimizer.progress.target == 48
        one.stop.set()
        one.end()


def test_a_running_run_follows_its_new_owner_after_a_thief_took_the_owners_key(texts: Path) -> None:
    recovery, successor = Identity.generate(), Identity.generate()
    with created_run(recovery_key=str(recovery.peer_id)) as (node, owner, signed):
        one = VolunteerThread(node, signed, new=True, data=texts)
        place = one.wait(events.EpochDone)
        stolen = publish_to_members(node, sign_change(signed, Change(paused=True), owner))
        one.wait(events.Paused, lambda event: event.member, since=place)
        recovered = publish_to_members(node, recover(stolen, recovery, successor))
        place = one.wait(events.RunChanged, lambda event: event.version == recovered.version)
        place = one.wait(events.EpochDone, since=place)
        changed = one.events[one.wait(events.RunChanged, lambda event: event.version == recovered.version)]
        assert isinstance(changed, events.RunChanged)
        assert changed.changes[0] == f"the recovery key made {successor.peer_id} its owner"
        with Node(bootstrap=node.addresses, listen=HERE) as thief:
            assert thief.wait_joined(10)
            last = sign(stolen.specification, owner, version=VERSION_MAX, created_s=signed.created_s)
            told = thief.network.run(send_version(thief.channels, last, [node.contact]), 10.0)
        assert told == {node.peer_id: recovered.version}
        publish_to_members(node, sign_change(recovered, Change(ended=True), successor))
        assert one.end().reason == "the run's owner ended it"


def test_a_paused_volunteer_holds_up_nobody_and_catches_up(texts: Path) -> None:
    with created_run() as (node, _, signed), Node(bootstrap=node.addresses, listen=HERE) as other:
        assert other.wait_joined(10)
        one = VolunteerThread(node, signed, new=True, data=texts)
        one.wait(events.Contributed)
        two = VolunteerThread(other, signed, new=False, data=texts)
        two.wait(events.Contributed)
        two.asked = "pause"
        paused = two.wait(events.Paused, lambda event: not event.member)
        seen = one.wait(events.EpochDone, lambda event: event.peers == 1, since=len(one.events))
        one.wait(events.EpochDone, lambda event: event.peers == 1, since=seen + 1)
        two.asked = ""
        place = two.wait(events.Resumed, since=paused)
        place = two.wait(events.Resynchronised, lambda event: event.loaded, since=place)
        two.wait(events.EpochDone, lambda event: event.peers == 2, since=place)
        one.stop.set()
        two.stop.set()
        two.end()
        assert [event for event in two.events if isinstance(event, events.RoundFailed)] == []


def test_a_run_resumes_from_its_checkpoint_and_the_model_can_be_exported(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with created_run() as (node, _, signed):
        one = VolunteerThread(
            node, signed, new=True, data=texts, checkpoints=CheckpointConfig(folder=folder, every_s=0.01)
        )
        one.wait(events.Saved)
        one.stop.set()
        last = one.end().epoch
    with created_run() as (node, _, signed):
        checkpoints = CheckpointConfig(folder=folder, every_s=0.01)
        one = VolunteerThread(node, signed, new=True, data=texts, checkpoints=checkpoints)
        place = one.wait(events.EpochDone)
        first = one.events[place]
        assert isinstance(first, events.EpochDone)
        assert first.epoch == last + 1
        one.stop.set()
        one.end()
    checkpoint = newest_checkpoint(folder, "tiny")
    export(signed, checkpoint, tmp_path / "model.safetensors", optimizer=False)
    specification = signed.specification
    model = make_task(specification.task.name, specification.task.settings).build_model(99)
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    export(signed, checkpoint, tmp_path / "all.safetensors", optimizer=True)
    assert any(
        name.startswith("optimizer.") for name in safetensors.torch.load_file(tmp_path / "all.safetensors")
    )


def test_a_volunteer_that_finds_nobody_continues_from_its_checkpoint(texts: Path, tmp_path: Path) -> None:
    """Regression test: after all had left, a run began again with the first parameters, silently."""
    config = CheckpointConfig(folder=tmp_path / "saved", every_s=0.01)
    with created_run() as (node, _, signed):
        one = VolunteerThread(node, signed, new=True, data=texts, checkpoints=config)
        one.wait(events.Saved)
        one.stop.set()
        last = one.end().epoch
        assert last > 0
    with created_run() as (node, _, signed):
        back = VolunteerThread(node, signed, new=False, data=texts, checkpoints=config)
        place = back.wait(events.EpochDone)
        assert getattr(back.events[place], "epoch", None) == last + 1
        with Node(bootstrap=node.addresses, listen=HERE) as other:
            assert other.wait_joined(10)
            fresh = VolunteerThread(other, signed, new=False, data=texts)
            fresh.wait(events.StateDownloaded, lambda event: event.epoch > last)
            fresh.wait(events.Contributed)
            fresh.stop.set()
            fresh.end()
        back.stop.set()
        back.end()


def test_a_run_with_powersgd_sends_factors(texts: Path) -> None:
    """Both volunteers have the same digests, and the traffic is about as much as estimated."""
    with created_run(strategy={"name": "powersgd", "rank": 1}, state_sync_epochs=1000) as (node, _, signed):
        with Node(bootstrap=node.addresses, listen=HERE) as other:
            assert other.wait_joined(10)
            one = VolunteerThread(node, signed, new=True, data=texts)
            one.wait(events.Contributed)
            two = VolunteerThread(other, signed, new=False, data=texts)
            place = two.wait(events.EpochDone, lambda event: event.peers == 2)
            for _ in range(2):
                place = two.wait(events.EpochDone, lambda event: event.peers == 2, since=place + 1)
            one.stop.set()
            two.stop.set()
            one.end()
            two.end()
        mine, others = (
            {event.epoch: event for event in of.events if isinstance(event, events.EpochDone)}
            for of in (one, two)
        )
        shared = [
            epoch for epoch in mine.keys() & others.keys() if mine[epoch].peers == others[epoch].peers == 2
        ]
        assert len(shared) >= 2
        specification = signed.specification
        described = make_task("bytelm", specification.task.settings).describe(4)
        expected = round_bytes(specification, described, 2)
        assert 10 * expected < round_bytes(specification.model_copy(update={"strategy": None}), described, 2)
        for epoch in sorted(shared)[1:]:  # the first one may include the download of the joining peer
            assert mine[epoch].digest == others[epoch].digest is not None
            assert mine[epoch].sent_bytes + others[epoch].sent_bytes == pytest.approx(2 * expected, rel=0.1)
