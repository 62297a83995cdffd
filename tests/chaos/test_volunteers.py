"""A run of volunteers in real processes continues while some are killed, leave or join."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from swarm.cli.children import Child, Children
from tests.wire.small_run import write_small_run

LOOPBACK = ("--listen", "127.0.0.1:0", "--identity", "new")
WAIT_S = 240.0  # to wait for an event; long, because a busy machine imports torch slowly


class Swarm:
    """Volunteer processes and their events."""

    def __init__(self, children: Children, folder: Path) -> None:
        self._children = children
        self.events: dict[str, list[Mapping[str, Any]]] = {}
        self.ended: set[str] = set()
        self.run_file = write_small_run(folder)

    def create(self, name: str, *bootstrap: str) -> None:
        options = [option for address in bootstrap for option in ("--bootstrap", address)]
        self.start(name, "start", str(self.run_file), *options, "--device", "cpu", *LOOPBACK)

    def join(self, name: str, address: str, *options: str) -> None:
        self.start(name, "join", address, "--yes", "--device", "cpu", *LOOPBACK, *options)

    def start(self, name: str, *arguments: str) -> None:
        self.events[name] = []
        self._children.start(name, *arguments)

    def process(self, name: str) -> Child:
        return self._children[name]

    def wait(self, what: str, done: Callable[[], Any]) -> Any:
        """Read events until `done` returns a true value. Fail with the last events if that takes too long."""
        deadline_s = time.monotonic() + WAIT_S
        while not (result := done()):
            line = self._children.next_line(min(1.0, deadline_s - time.monotonic()))
            if line is not None:
                name, event = line
                if event is None:
                    self.ended.add(name)
                else:
                    self.events[name].append(event)
            assert time.monotonic() < deadline_s, f"{what} did not happen; last events: {self.last_events()}"
        return result

    def last_events(self) -> dict[str, Any]:
        return {
            name: (events[-1] if events else None, name in self.ended) for name, events in self.events.items()
        }

    def of(self, name: str, kind: str) -> list[Mapping[str, Any]]:
        return [event for event in self.events[name] if event["event"] == kind]

    def address(self, name: str) -> str:
        listening = self.wait(f"{name} listens", lambda: self.of(name, "listening"))
        return str(listening[0]["invite"])

    def epoch(self, name: str) -> int:
        return max((event["epoch"] for event in self.of(name, "epoch")), default=0)

    def wait_epochs(self, names: list[str], more: int = 2, peers: int = 1) -> None:
        """Wait until each volunteer has completed `more` epochs in rounds of at least `peers` peers."""
        seen = {name: len(self.of(name, "epoch")) for name in names}

        def done() -> bool:
            return all(
                len([e for e in self.of(name, "epoch")[seen[name] :] if e["peers"] >= peers]) >= more
                for name in names
            )

        self.wait(f"{more} more epochs of {names} with {peers} peers", done)

    def digests_agree(self, names: list[str]) -> bool:
        by_epoch: dict[int, set[str]] = {}
        for name in names:
            for event in self.of(name, "epoch"):
                if event["digest"]:
                    by_epoch.setdefault(event["epoch"], set()).add(event["digest"])
        return all(len(digests) == 1 for digests in by_epoch.values())


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with Children() as children:
        yield Swarm(children, tmp_path)


def gone(child: Child) -> bool:
    with contextlib.suppress(Exception):
        child.process.wait(5.0)
    return not child.alive


def test_a_volunteer_joins_trains_and_leaves(swarm: Swarm) -> None:
    swarm.create("founder")
    swarm.join("volunteer", swarm.address("founder"))
    swarm.wait_epochs(["founder", "volunteer"], more=2, peers=2)
    assert swarm.digests_agree(["founder", "volunteer"])
    run = swarm.of("volunteer", "run")[0]
    assert (run["name"], run["created"], run["target_batch_size"]) == ("small", False, 32)
    asked_s = time.monotonic()
    swarm.process("volunteer").terminate()
    finished = swarm.wait("the volunteer finishes", lambda: swarm.of("volunteer", "finished"))[0]
    assert gone(swarm.process("volunteer"))
    assert time.monotonic() - asked_s < 3.0
    assert swarm.process("volunteer").process.returncode == 0
    assert finished["rounds"] >= 2
    assert finished["samples"] > 0


@pytest.mark.chaos
def test_a_run_survives_a_killed_volunteer_and_a_late_one_catches_up(swarm: Swarm) -> None:
    swarm.create("founder")
    for name in ("one", "two"):
        swarm.join(name, swarm.address("founder"))
    swarm.wait_epochs(["founder", "one", "two"], more=2, peers=3)
    swarm.process("two").kill()
    swarm.wait_epochs(["founder", "one"], more=3)
    swarm.join("late", swarm.address("one"))
    state = swarm.wait("the late one has the state", lambda: swarm.of("late", "state"))[0]
    assert state["epoch"] >= 3
    swarm.wait_epochs(["founder", "one", "late"], more=3, peers=3)
    assert swarm.digests_agree(["founder", "one", "late"])


@pytest.mark.chaos
def test_a_run_continues_and_can_be_joined_after_its_creator_left(swarm: Swarm) -> None:
    swarm.create("founder")
    for name in ("one", "two"):
        swarm.join(name, swarm.address("founder"))
    swarm.wait_epochs(["founder", "one", "two"], more=2, peers=3)
    swarm.process("founder").kill()
    swarm.wait_epochs(["one", "two"], more=2, peers=2)
    swarm.join("late", swarm.address("two"), "--run", "small")
    swarm.wait("the late one has the state", lambda: swarm.of("late", "state"))
    swarm.wait_epochs(["one", "two", "late"], more=2, peers=3)
    assert swarm.digests_agree(["one", "two", "late"])
    assert swarm.of("late", "run")[0]["run_id"] == swarm.of("founder", "run")[0]["run_id"]


@pytest.mark.chaos
def test_children_notice_the_death_of_their_parent(swarm: Swarm) -> None:
    """When the parent dies, the standard input of its children ends. The test closes it instead."""
    swarm.create("founder")
    swarm.wait_epochs(["founder"], more=1)
    stdin = swarm.process("founder").process.stdin
    assert stdin is not None
    closed_s = time.monotonic()
    stdin.close()
    swarm.process("founder").process.wait(10.0)
    assert time.monotonic() - closed_s < 3.0
