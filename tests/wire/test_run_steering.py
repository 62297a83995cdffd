"""Two volunteers on real sockets while their owner changes the run, one pauses, is banned, and the founder
resumes a checkpoint; what a run's file asks of rounds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from averaging.optim.optimizer import Optimizer
from swarm.core.identity import Identity
from swarm.node import Node
from swarm.run import events
from swarm.run.changes import Change, send_version, sign_change
from swarm.run.checkpoints import CheckpointConfig
from swarm.run.creation import create_run
from swarm.run.directory import RunDirectory
from swarm.run.estimate import read_members, round_bytes
from swarm.run.exporting import export, newest_checkpoint
from swarm.run.specification import RunSpecification, SignedSpecification
from swarm.run.task import make_task
from swarm.run.volunteer import Volunteer, VolunteerConfig

HERE = "127.0.0.1:0"
TABLE = {
    "name": "tiny",
    "target_batch_size": 32,
    "batch_size": 4,
    "state_sync_epochs": 5,
    "task": {"name": "bytelm", "settings": {"width": 16, "layers": 1, "heads": 2, "context": 16}},
}


class Trained:
    """A volunteer in a thread, and what it told."""

    def __init__(self, node: Node, signed: SignedSpecification, *, new: bool, **config: Any) -> None:
        self.node, self.stop = node, threading.Event()
        self.told: list[events.Event] = []
        self._news = threading.Condition()
        self.paused = threading.Event()
        directory = RunDirectory(node.dht.service, node.peer_id, clock=node.clock)
        self.directory = directory
        config = {"device": "cpu", "asked_to_pause": self.paused.is_set, **config}
        self.volunteer = Volunteer(node, signed, directory, VolunteerConfig(**config), self._tell, self.stop)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(new,), daemon=True)
        self._thread.start()

    def _run(self, new: bool) -> None:
        try:
            self.volunteer.train(torch.device("cpu"), new=new)
        except BaseException as error:
            self.error = error
            with self._news:
                self._news.notify_all()

    def _tell(self, event: events.Event) -> None:
        with self._news:
            self.told.append(event)
            self._news.notify_all()

    def wait(
        self, kind: type[events.Event], fits: Callable[[Any], bool] = lambda event: True, since: int = 0
    ) -> int:
        """Until it told this; returns the place of it, from which to wait for what follows."""
        deadline_s = time.monotonic() + 60
        with self._news:
            while True:
                for place in range(since, len(self.told)):
                    if isinstance(self.told[place], kind) and fits(self.told[place]):
                        return place
                if self.error is not None:
                    raise self.error
                assert self._news.wait(deadline_s - time.monotonic()), (
                    f"no {kind.__name__}; it told {self.told[since:][-5:]}"
                )

    def end(self) -> events.Finished:
        self._thread.join(30)
        finished = self.told[self.wait(events.Finished)]
        assert isinstance(finished, events.Finished)
        return finished


@contextmanager
def founded(**changes: Any) -> Iterator[tuple[Node, Identity, SignedSpecification]]:
    owner = Identity.generate()
    with Node(listen=HERE, identity=owner) as node:
        directory = RunDirectory(node.dht.service, node.peer_id, clock=node.clock)
        specification = RunSpecification.from_table({**TABLE, **changes}, "test")
        signed, _ = node.network.run(create_run(directory, specification, owner, node.clock), 30.0)
        yield node, owner, signed


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(
            f"the quick brown fox number {number} jumps over the lazy dog. " * 300
        )
    return folder


def tell_all(node: Node, signed: SignedSpecification) -> SignedSpecification:
    """What `swarm change` does, from a node of nobody's."""
    with Node(bootstrap=node.addresses, listen=HERE) as visitor:
        assert visitor.wait_joined(10)
        directory = RunDirectory(visitor.dht.service, visitor.peer_id, clock=visitor.clock)
        visitor.network.run(directory.publish(signed), 30.0)
        contacts = visitor.network.run(read_members(visitor.dht.service, signed.run_id), 10.0)
        following = visitor.network.run(send_version(visitor.channels, signed, contacts), 10.0)
    assert set(following.values()) <= {signed.version}
    assert following
    return signed


def insists(node: Node, signed: SignedSpecification) -> None:
    """A banned peer that does not follow the specification is refused as a joiner, and whatever it says of
    its progress.
    """
    parameter = torch.nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([parameter], lr=0.1)
    with Optimizer(
        inner, node=node, run=signed.run_id, target_batch_size=8, batch_size_per_step=8
    ) as stubborn:
        loaded = stubborn.load_state_from_peers(timeout_s=2)
        assert not loaded.loaded
        assert "banned" in str(loaded.failures) or "banned" in loaded.reason or not stubborn.contacts()


def test_the_owner_changes_pauses_bans_and_ends_a_running_run(texts: Path) -> None:
    with founded() as (node, owner, signed), Node(bootstrap=node.addresses, listen=HERE) as other:
        assert other.wait_joined(10)
        one = Trained(node, signed, new=True, data=texts)
        one.wait(events.Contributed)
        two = Trained(other, signed, new=False, data=texts)
        two.wait(events.Contributed)
        signed = tell_all(node, sign_change(signed, Change(target_batch_size=48), owner))
        for trained in (one, two):
            place = trained.wait(events.RunChanged, lambda event: event.version == 2)
            trained.wait(events.EpochDone, since=place)
            assert trained.volunteer._training is not None
            assert trained.volunteer._training.optimizer.progress.target == 48
        signed = tell_all(node, sign_change(signed, Change(paused=True), owner))
        two.wait(events.Paused, lambda event: event.member)
        place = one.wait(events.Paused, lambda event: event.member)
        signed = tell_all(node, sign_change(signed, Change(paused=False), owner))
        place = one.wait(events.Resumed, since=place)
        one.wait(events.EpochDone, lambda event: event.peers == 2, since=place)
        signed = tell_all(node, sign_change(signed, Change(ban=(str(other.peer_id),)), owner))
        assert two.end().reason == "the owner of this run has banned this peer"
        place = one.wait(events.RunChanged, lambda event: event.version == 5)
        place = one.wait(events.EpochDone, since=place)
        insists(other, signed)
        assert one.volunteer._training is not None
        assert list(one.volunteer._training.optimizer.progress.peers) == [node.peer_id]
        one.wait(events.EpochDone, lambda event: event.peers in (0, 1), since=place + 1)
        signed = tell_all(node, sign_change(signed, Change(ended=True), owner))
        assert one.end().reason == "the run's owner ended it"


def test_who_pauses_leaves_the_others_alone_and_catches_up(texts: Path) -> None:
    with founded() as (node, _, signed), Node(bootstrap=node.addresses, listen=HERE) as other:
        assert other.wait_joined(10)
        one = Trained(node, signed, new=True, data=texts)
        one.wait(events.Contributed)
        two = Trained(other, signed, new=False, data=texts)
        two.wait(events.Contributed)
        two.paused.set()
        paused = two.wait(events.Paused, lambda event: not event.member)
        seen = one.wait(events.EpochDone, lambda event: event.peers == 1, since=len(one.told))
        one.wait(events.EpochDone, lambda event: event.peers == 1, since=seen + 1)
        two.paused.clear()
        place = two.wait(events.Resumed, since=paused)
        place = two.wait(events.Resynchronised, lambda event: event.loaded, since=place)
        two.wait(events.EpochDone, lambda event: event.peers == 2, since=place)
        one.stop.set()
        two.stop.set()
        assert two.end().failed_rounds == 0


def test_the_founder_goes_on_from_its_checkpoint_and_exports_the_model(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with founded() as (node, _, signed):
        one = Trained(
            node, signed, new=True, data=texts, saving=CheckpointConfig(folder=folder, every_s=0.01)
        )
        one.wait(events.Saved)
        one.stop.set()
        last = one.end().epoch
    with founded() as (node, _, signed):
        saving = CheckpointConfig(folder=folder, every_s=0.01, resume=True)
        one = Trained(node, signed, new=True, data=texts, saving=saving)
        place = one.wait(events.EpochDone)
        first = one.told[place]
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


def test_a_run_whose_file_asks_for_factors_averages_by_factors(texts: Path) -> None:
    """Both hold the same bytes after each epoch, for about as much traffic as was foretold."""
    with founded(strategy={"name": "powersgd", "rank": 1}, state_sync_epochs=1000) as (node, _, signed):
        with Node(bootstrap=node.addresses, listen=HERE) as other:
            assert other.wait_joined(10)
            one = Trained(node, signed, new=True, data=texts)
            one.wait(events.Contributed)
            two = Trained(other, signed, new=False, data=texts)
            place = two.wait(events.EpochDone, lambda event: event.peers == 2)
            for _ in range(2):
                place = two.wait(events.EpochDone, lambda event: event.peers == 2, since=place + 1)
            one.stop.set()
            two.stop.set()
            one.end()
            two.end()
        mine, others = (
            {event.epoch: event for event in of.told if isinstance(event, events.EpochDone)}
            for of in (one, two)
        )
        shared = [
            epoch for epoch in mine.keys() & others.keys() if mine[epoch].peers == others[epoch].peers == 2
        ]
        assert len(shared) >= 2
        specification = signed.specification
        described = make_task("bytelm", specification.task.settings).describe(4)
        foretold = round_bytes(specification, described, 2)
        assert 10 * foretold < round_bytes(specification.model_copy(update={"strategy": None}), described, 2)
        for epoch in sorted(shared)[1:]:  # to the first one the newcomer's download may have been added
            assert mine[epoch].digest == others[epoch].digest is not None
            assert mine[epoch].sent_bytes + others[epoch].sent_bytes == pytest.approx(2 * foretold, rel=0.1)
