"""Checkpoints by a monitor of a run that two peers train: agreed on, loadable, pruned."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import safetensors.torch
import torch

from averaging.optim.state.checkpoint import read
from averaging.optim.state.training_state import TrainingState
from swarm.core.errors import UsageError
from swarm.core.ids import Contact
from swarm.monitor.logic.eventlog import EventLog
from swarm.monitor.saving import StateSaver, StateSavingConfig
from swarm.monitor.watching import Watch, WatchConfig
from swarm.node import Node
from swarm.run import events
from swarm.run.inner_optimizer import build_optimizer, schedule_factory
from swarm.run.signed import SignedSpecification
from swarm.run.task import make_task
from tests.wire.lone_donor import lone_donor
from tests.wire.volunteers import HERE, VolunteerThread, created_run
from tests.wire.watched_run import NAME, watched_run

_WAIT_S = 40.0


def test_a_monitor_saves_the_state_that_the_donors_agree_on(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with created_run() as (founder, _, signed), Node(bootstrap=founder.addresses, listen=HERE) as node:
        assert node.wait_joined(10)
        first = VolunteerThread(founder, signed, new=True, data=texts)
        first.wait(events.EpochDone)
        second = VolunteerThread(node, signed, new=False, data=texts)
        second.wait(events.EpochDone, lambda event: event.peers == 2)
        entry = (Contact.parse(node.addresses[0]),)
        try:
            with Watch(
                WatchConfig(entry=entry, saving=StateSavingConfig(folder=folder, every_s=0.2, kept_max=2))
            ) as watch:
                deadline_s = time.monotonic() + _WAIT_S
                while sum(event.kind == "saved" for event in watch.view().events) < 3:
                    assert time.monotonic() < deadline_s, [event.text for event in watch.view().events]
                    time.sleep(0.1)
                saved = [event for event in watch.view().events if event.kind == "saved"]
                assert all("donors agree" in event.text or "donor agrees" in event.text for event in saved)
                assert any("2 donors agree" in event.text for event in saved)
                assert "Saved epoch" in watch.view().checkpoint
                electors = watch.node.network.run(watch.electors(), 10.0)
                assert {one.peer_id for one in electors} == {founder.peer_id, node.peer_id}
        finally:
            for one in (first, second):
                one.stop.set()
            for one in (first, second):
                one.end()
    kept = sorted(folder.iterdir())
    assert len(kept) == 2, "pruned, and nothing half-written beside them"
    newest = read(kept[-1])
    tensors = safetensors.torch.load_file(kept[-1])
    model = make_task("bytelm", signed.specification.task.settings).build_model(signed.specification.seed)
    named = {
        name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")
    }
    model.load_state_dict(named, strict=False)
    assert named.keys() == dict(model.named_parameters()).keys()
    assert newest.epoch > 0
    assert all(torch.isfinite(tensor).all() for tensor in named.values())


def test_a_monitor_saves_the_state_of_the_electors_when_most_donors_lie(texts: Path, tmp_path: Path) -> None:
    with created_run() as (founder, _, signed), ExitStack() as stack:
        honest = serve(founder, signed, value=0.5)
        liars = [stack.enter_context(Node(listen=HERE)) for _ in range(3)]
        for liar in liars:
            serve(liar, signed, value=9.0)
        reader = stack.enter_context(Node(listen=None))
        saver = StateSaver(
            signed=signed,
            caller=reader.channels,
            clock=reader.clock,
            model=cast(Any, SimpleNamespace(epoch=honest.epoch, events=EventLog(), checkpoint="")),
            donors=lambda: tuple(node.contact for node in [*liars, founder]),
            electors=lambda: electors_of([founder.contact]),
            config=StateSavingConfig(folder=tmp_path / "kept"),
        )
        assert reader.network.run(saver.attempt(), _WAIT_S)
    (kept,) = (tmp_path / "kept").iterdir()
    tensors = safetensors.torch.load_file(kept)
    saved = [tensor for name, tensor in tensors.items() if name.startswith("model.")]
    assert saved
    assert all(bool((tensor == 0.5).all()) for tensor in saved)


async def electors_of(contacts: list[Contact]) -> list[Contact]:
    return contacts


def serve(node: Node, signed: SignedSpecification, value: float) -> TrainingState:
    """Let a node give a state in which all parameters have this value."""
    specification = signed.specification
    model = make_task(specification.task.name, specification.task.settings).build_model(specification.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    inner = build_optimizer(model, specification.optimizer)
    state = TrainingState(inner, (), schedule_factory(specification.optimizer.schedule)(inner))
    state.epoch, state.canonical = 5, True
    lone_donor(node, signed.run_id, state).start()
    return state


def test_a_run_without_a_specification_cannot_be_saved(tmp_path: Path) -> None:
    with watched_run() as nodes:
        config = WatchConfig(entry=(nodes[0].contact,), run=NAME, saving=StateSavingConfig(folder=tmp_path))
        with pytest.raises(UsageError, match="--save needs a run with a specification"):
            Watch(config)
