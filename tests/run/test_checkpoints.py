"""Checkpoints of a volunteer: from which it continues, and those that a failed device prevents."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from averaging.history.chain import Chain
from averaging.history.encoding import encode_chain, encode_root
from averaging.history.lineage import Lineage
from averaging.optim.state.checkpoint import Checkpoints
from averaging.optim.state.training_state import TrainingState
from swarm.core.errors import SwarmError
from swarm.run.checkpoints import CheckpointConfig, CheckpointWriter
from swarm.run.events import Event, Notice
from tests.averaging.history.peers import PEERS, RUN, certificate, upon


class View:
    epoch, closed = 4, False
    header: ClassVar[dict[str, Any]] = {}

    def close(self) -> None:
        self.closed = True


class FakeOptimizer:
    epoch = 4

    def __init__(self) -> None:
        self.view = View()

    def state_view(self) -> Any:
        return self.view


def saved(folder: Path, *epochs: int, features: int = 4) -> tuple[TrainingState, CheckpointConfig]:
    """Write a checkpoint of each epoch, and return the state and the folder's configuration."""
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(features))], lr=0.1)
    state = TrainingState(inner)
    for epoch in epochs:
        with state.lock:
            state.mark_changed(epoch)
        Checkpoints(folder).save(state.view(), ["weight"])
    return state, CheckpointConfig(folder=folder)


class Loading:
    """An optimizer that loads checkpoints."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def load_state(self, blob: bytearray) -> None:
        self._state.load(blob)


def test_the_newest_checkpoint_is_resumed_and_named(tmp_path: Path) -> None:
    state, config = saved(tmp_path / "run", 3, 9)
    with state.lock:
        state.mark_changed(0)
    emitted: list[Event] = []
    writer = CheckpointWriter(config, ["weight"], {}, emitted.append)
    optimizer: Any = Loading(state)
    assert writer.resume(optimizer)
    assert state.epoch == 9
    [notice] = emitted
    assert isinstance(notice, Notice)
    assert "nobody else has a state of this run: training continues from epoch 9" in notice.text
    from_scratch = CheckpointConfig(folder=config.folder, from_scratch=True)
    assert not CheckpointWriter(from_scratch, ["weight"], {}, emitted.append).resume(optimizer)


def test_a_checkpoint_of_another_model_is_named_and_not_resumed(tmp_path: Path) -> None:
    _, config = saved(tmp_path / "run", 9, features=5)
    state, _ = saved(tmp_path / "other")
    emitted: list[Event] = []
    writer = CheckpointWriter(config, ["weight"], {}, emitted.append)
    optimizer: Any = Loading(state)
    assert not writer.resume(optimizer)
    assert "is not of this run as it is now" in str(emitted)
    assert state.epoch == 0
    writer.start_over()
    assert len(Checkpoints(tmp_path / "run.earlier-1").newest_first()) == 1


def test_checkpoints_of_a_later_epoch_than_the_others_are_set_aside(tmp_path: Path) -> None:
    """Regression test: a volunteer that followed a run that had begun again wrote over its own history."""
    _, config = saved(tmp_path / "run", 1119)
    emitted: list[Event] = []
    writer = CheckpointWriter(config, ["weight"], {}, emitted.append)
    writer.follow(downloaded(1119))
    assert not emitted
    writer.follow(downloaded(413))
    assert "the others are in epoch 413 of another history" in str(emitted)
    assert Checkpoints(tmp_path / "run.earlier-1").newest_epoch() == 1119
    assert not (tmp_path / "run").exists()


def downloaded(epoch: int, past: Chain | None = None) -> Any:
    """Return an optimizer that has loaded the state of other peers."""
    header = {"history": encode_root(past.end), "past": encode_chain(past)} if past is not None else {}
    view = SimpleNamespace(header=header, close=lambda: None)
    return SimpleNamespace(epoch=epoch, state_view=lambda: view)


def history_of(first: int, rounds: int) -> Chain:
    """Return the certificates of a run that the peer of this number began."""
    lineage = Lineage(RUN, PEERS[first])
    for _ in range(rounds):
        lineage.extend(certificate(upon(lineage, PEERS[first:3]), PEERS[first:3]))
    return lineage.chain()


@pytest.mark.parametrize("first", [0, 1])
def test_checkpoints_of_a_run_that_others_began_anew_are_set_aside_whatever_its_epoch(
    tmp_path: Path, first: int
) -> None:
    """Regression test: where the new history had come further, its checkpoints replaced the old ones."""
    state, config = saved(tmp_path / "run")
    with state.lock:
        state.mark_changed(3, root=history_of(0, 3).end)
    Checkpoints(tmp_path / "run").save(state.view(), ["weight"])
    emitted: list[Event] = []
    CheckpointWriter(config, ["weight"], {}, emitted.append).follow(downloaded(9, history_of(first, 9)))
    if first == 0:
        assert not emitted, "it is this machine's own history, which the others have continued"
        return
    assert "the others are in epoch 9 of another history" in str(emitted)
    assert "this machine's checkpoint of epoch 3" in str(emitted)
    assert Checkpoints(tmp_path / "run.earlier-1").newest_epoch() == 3


def test_checkpoints_from_before_the_certificates_that_the_others_keep_stay(tmp_path: Path) -> None:
    state, config = saved(tmp_path / "run")
    with state.lock:
        state.mark_changed(3, root=history_of(0, 3).end)
    Checkpoints(tmp_path / "run").save(state.view(), ["weight"])
    emitted: list[Event] = []
    kept = history_of(0, 9).end  # as if no certificates were kept before the ninth
    CheckpointWriter(config, ["weight"], {}, emitted.append).follow(downloaded(9, kept))
    assert not emitted


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be"),
            "CUDA error: device-side assert triggered",
        ),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried"), "CUDA out of memory. Tried"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_a_checkpoint_that_a_failed_device_prevents_is_reported_and_leaves_no_file(
    error: BaseException, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise error

    monkeypatch.setattr("averaging.optim.state.checkpoint.write", failing)
    emitted: list[Event] = []
    optimizer: Any = FakeOptimizer()
    # `close` writes a last checkpoint and waits for it
    CheckpointWriter(CheckpointConfig(folder=tmp_path), [], {}, emitted.append).close(
        optimizer, threading.Event()
    )
    assert emitted == [Notice(text=f"the checkpoint of epoch 4 was not written: {why}")]
    assert optimizer.view.closed
    assert list(tmp_path.iterdir()) == []


def test_a_volunteer_that_leaves_does_not_say_that_training_continues(tmp_path: Path) -> None:
    """Before, the message about a full disk said so after Ctrl-C, too."""
    (tmp_path / "run").write_text("a file where the folder would be")
    state, _ = saved(tmp_path / "other")
    with state.lock:
        state.mark_changed(4)

    class Optimizer:
        epoch = 4

        def state_view(self) -> Any:
            return state.view()

    texts: list[str] = []
    told = threading.Event()

    def emit(event: Event) -> None:
        assert isinstance(event, Notice)
        texts.append(event.text)
        told.set()

    optimizer: Any = Optimizer()
    config = CheckpointConfig(folder=tmp_path / "run", every_s=1e-9)
    writer = CheckpointWriter(config, ["weight"], {}, emit)
    writer.after_epoch(optimizer)
    assert told.wait(30), "the writer's thread says that the first checkpoint was not written"
    Optimizer.epoch = 5
    writer.close(optimizer, threading.Event())
    assert len(texts) == 2
    assert texts[0].endswith("; training continues")
    assert "could not be written" in texts[1]
    assert "training continues" not in texts[1]


def test_result_is_written_again_when_its_periodic_checkpoint_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: the epoch counted as saved, although the disk was full."""
    state, config = saved(tmp_path / "run")
    with state.lock:
        state.mark_changed(8)
    told, write, errors = threading.Event(), Checkpoints.save, [SwarmError("the disk is full")]

    def save(*arguments: Any) -> Path:
        if errors:
            raise errors.pop()
        return write(*arguments)

    monkeypatch.setattr(Checkpoints, "save", save)
    optimizer: Any = SimpleNamespace(epoch=8, state_view=state.view)
    due = CheckpointConfig(folder=config.folder, every_s=1e-9)
    writer = CheckpointWriter(due, ["weight"], {}, lambda event: told.set())
    writer.after_epoch(optimizer)
    assert told.wait(30)
    writer.close(optimizer, threading.Event())
    assert Checkpoints(config.folder).newest_epoch() == 8


class Disk:
    """Checkpoints on a disk that writes one only when it may."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, emit: Callable[[Event], None]) -> None:
        self.begun, self.may_write = threading.Event(), threading.Event()
        self.state, self.config = saved(folder)
        with self.state.lock:
            self.state.mark_changed(8)
        write = Checkpoints.save

        def save(*arguments: Any) -> Path:
            self.begun.set()
            assert self.may_write.wait(60)
            return write(*arguments)

        monkeypatch.setattr(Checkpoints, "save", save)
        self.writer = CheckpointWriter(self.config, ["weight"], {}, emit)

    @property
    def epoch(self) -> int:
        return self.state.epoch

    def state_view(self) -> Any:
        return self.state.view()


def test_a_run_that_has_ended_is_saved_however_long_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: the result of a run of a large model that ended before its first periodic checkpoint
    was lost, without a word.
    """
    monkeypatch.setattr("swarm.run.checkpoints._FINAL_S_MAX", 0.0)
    disk = Disk(tmp_path / "run", monkeypatch, lambda event: None)
    optimizer: Any = disk
    closing = threading.Thread(target=disk.writer.close, args=(optimizer, threading.Event()))
    closing.start()
    assert disk.begun.wait(60)
    assert closing.is_alive()
    disk.may_write.set()
    closing.join(60)
    assert Checkpoints(tmp_path / "run").newest_epoch() == 8


def test_who_is_asked_to_end_waits_for_no_slow_disk_and_says_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.run.checkpoints._FINAL_S_MAX", 0.0)
    emitted: list[Event] = []
    disk = Disk(tmp_path / "run", monkeypatch, emitted.append)
    optimizer: Any = disk
    stop = threading.Event()
    closing = threading.Thread(target=disk.writer.close, args=(optimizer, stop))
    closing.start()
    assert disk.begun.wait(60)
    stop.set()
    closing.join(60)
    assert not closing.is_alive()
    [notice] = emitted
    assert isinstance(notice, Notice)
    assert notice.text == (
        "epoch 8 is not saved: a checkpoint takes this machine longer than 0 s; there is none yet"
    )
    disk.may_write.set()
