"""Checkpoints by a monitor of a run that two peers train: agreed on, loadable, pruned."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from averaging.optim.state.checkpoint import read
from swarm.core.errors import UsageError
from swarm.core.ids import Contact
from swarm.monitor.saving import StateSavingConfig
from swarm.monitor.watching import Watch, WatchConfig
from swarm.node import Node
from swarm.run import events
from swarm.run.task import make_task
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


def test_a_run_without_a_specification_cannot_be_saved(tmp_path: Path) -> None:
    with watched_run() as nodes:
        config = WatchConfig(entry=(nodes[0].contact,), run=NAME, saving=StateSavingConfig(folder=tmp_path))
        with pytest.raises(UsageError, match="--save needs a run with a specification"):
            Watch(config)
