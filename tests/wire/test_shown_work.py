"""A volunteer shows what may take long: building, loading, downloading with bytes, and saving."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.core.working import Work, shown_by
from swarm.node import Node
from swarm.run import events
from swarm.run.checkpoints import CheckpointConfig
from tests.wire.volunteers import HERE, VolunteerThread, created_run


def test_a_volunteer_shows_its_work_with_the_bytes_of_the_state(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.core.working.SHOWN_AFTER_S", 0.0)  # a small model takes no second
    shown: list[Work] = []
    with created_run() as (node, _, signed), Node(bootstrap=node.addresses, listen=HERE) as other:
        assert other.wait_joined(10)
        one = VolunteerThread(node, signed, new=True, data=texts)
        one.wait(events.EpochDone)
        with shown_by(shown.append):
            saves = CheckpointConfig(folder=tmp_path / "kept", every_s=0.01)
            two = VolunteerThread(other, signed, new=False, data=texts, checkpoints=saves)
            two.wait(events.Saved)
            two.stop.set()
            two.end()
        one.stop.set()
        one.end()
    over = {work.what: work for work in shown if work.is_over}
    assert {"building the model", "loading the training data", "downloading the state"} <= over.keys()
    state = over["downloading the state"]
    assert (state.unit, state.done) == ("bytes", state.total)
    assert state.total > 1000
    assert any(what.startswith("saving epoch ") for what in over)
