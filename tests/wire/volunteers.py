"""Volunteers of a created run, each in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from swarm.core.identity import Identity
from swarm.core.ids import PeerId
from swarm.membership.invite import RunIdentity, Terms, make_invite
from swarm.node import Node
from swarm.run import events
from swarm.run.creation import create_run
from swarm.run.directory import RunDirectory
from swarm.run.signed import SignedSpecification
from swarm.run.specification import RunSpecification
from swarm.run.volunteer import Volunteer
from swarm.run.volunteer_config import VolunteerConfig

HERE = "127.0.0.1:0"


TABLE = {
    "name": "tiny",
    "members": "open",
    "target_batch_size": 32,
    "batch_size": 4,
    "state_sync_epochs": 5,
    "task": {"name": "bytelm", "settings": {"width": 16, "layers": 1, "heads": 2, "context": 16}},
}


class VolunteerThread:
    """A volunteer in a thread, and its events."""

    def __init__(self, node: Node, signed: SignedSpecification, *, new: bool, **config: Any) -> None:
        self.node, self.stop = node, threading.Event()
        self.events: list[events.Event] = []
        self._changed = threading.Condition()
        self.asked = ""  # as `VolunteerConfig.asked_to_pause` returns it
        directory = RunDirectory(node.dht.service, clock=node.clock)
        self.directory = directory
        config = {"device": "cpu", "asked_to_pause": lambda: self.asked, **config}
        self.volunteer = Volunteer(node, signed, directory, VolunteerConfig(**config), self._emit, self.stop)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(new,), daemon=True)
        self._thread.start()

    def _run(self, new: bool) -> None:
        try:
            self.volunteer.train(torch.device("cpu"), new=new)
        except BaseException as error:
            self.error = error
            with self._changed:
                self._changed.notify_all()

    def _emit(self, event: events.Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(
        self, kind: type[events.Event], fits: Callable[[Any], bool] = lambda event: True, since: int = 0
    ) -> int:
        """Wait for an event of this kind at index `since` or later. Return its index."""
        deadline_s = time.monotonic() + 60
        with self._changed:
            while True:
                for place in range(since, len(self.events)):
                    if isinstance(self.events[place], kind) and fits(self.events[place]):
                        return place
                if self.error is not None:
                    raise self.error
                assert self._changed.wait(deadline_s - time.monotonic()), (
                    f"no {kind.__name__}; the last events were {self.events[since:][-5:]}"
                )

    def end(self) -> events.Finished:
        self._thread.join(30)
        finished = self.events[self.wait(events.Finished)]
        assert isinstance(finished, events.Finished)
        return finished


@contextmanager
def created_run(**changes: Any) -> Iterator[tuple[Node, Identity, SignedSpecification]]:
    owner = Identity.generate()
    table = {**TABLE, **changes}
    entries = []
    if table["members"] == "invited":
        terms = Terms(roles=("train", "serve", "observe"), uses=9, lifetime_s=86400.0)
        recovery = PeerId.parse(table["recovery_key"]) if "recovery_key" in table else None
        run = RunIdentity(owner.peer_id, table["name"], recovery)
        entries.append(make_invite(run, owner, (), terms, now_s=time.time()).text())
    with Node(entries, listen=HERE, identity=owner) as node:
        directory = RunDirectory(node.dht.service, clock=node.clock)
        specification = RunSpecification.from_table(table, "test")
        signed, _ = node.network.run(create_run(directory, specification, owner, node.clock), 30.0)
        yield node, owner, signed
