"""Views of a state: each shows the state of one moment, no matter what the trainer does meanwhile, and is
copied only before a write.
"""

from __future__ import annotations

import threading

import pytest
import torch

from averaging.optim.state.snapshot import CHUNK_BYTES
from averaging.optim.state.training_state import TrainingState
from swarm.core.errors import PeerError


def made(elements: int = 3 * CHUNK_BYTES // 4 + 777) -> TrainingState:
    torch.manual_seed(1)
    sizes = (elements, 5, 0, 1)
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in sizes] + [
        torch.nn.Parameter(torch.randn(3, 4).t())
    ]
    return TrainingState(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))


def move(state: TrainingState) -> None:
    with state.lock, torch.no_grad():
        for parameter in state.parameters:
            parameter.add_(1.0)
        state.mark_changed(state.epoch + 1)


def test_an_undisturbed_view_is_never_copied() -> None:
    state = made()
    expected = bytes(state.snapshot().blob)
    view = state.view()
    view.compute_digests()
    assert b"".join(bytes(view.chunk(index)) for index in range(view.chunks)) == expected
    assert view.digest == state.snapshot().digest
    assert view._blob is None
    view.close()
    move(state)
    assert view._blob is None, "who has closed it costs the trainer nothing"


def test_tensors_of_inference_mode_can_be_read_and_are_never_taken_for_unchanged() -> None:
    """Regression: torch counts no writes to them, and raises an error where it is asked."""
    with torch.inference_mode():
        frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    state = TrainingState(torch.optim.SGD([frozen, torch.nn.Parameter(torch.ones(2))], lr=0.1))
    first, digest = state.view(), state.frozen_digest()
    with torch.inference_mode():
        frozen.add_(1.0)
    second = state.view()
    assert first.contents != second.contents
    assert state.frozen_digest() != digest
    first.close()
    second.close()


@pytest.mark.parametrize("ahead", [0, 1, 2, 100])
def test_a_view_keeps_the_state_of_its_creation_whenever_a_write_comes(ahead: int) -> None:
    state = made()
    expected, digest = bytes(state.snapshot().blob), state.snapshot().digest
    view = state.view()
    first = bytes(view.chunk(0))
    with state.reading:
        view.complete_copy_locked(ahead)
    move(state)
    move(state)
    assert view.is_copied
    assert first + b"".join(bytes(view.chunk(index)) for index in range(1, view.chunks)) == expected
    view.compute_digests()
    assert view.digest == digest
    assert view.epoch == 0
    assert state.snapshot().digest != digest


def test_the_tensors_of_a_view_are_copies() -> None:
    state = made()
    view = state.view()
    before = [view.tensor(place) for place in range(len(view.names))]
    wanted = [parameter.detach().clone() for parameter in state.parameters]
    move(state)
    after = [view.tensor(place) for place in range(len(view.names))]
    for one, two, three in zip(before, after, wanted, strict=True):
        assert torch.equal(one, three)
        assert torch.equal(two, three)


def test_readers_and_a_trainer_at_the_same_time() -> None:
    state = made()
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            move(state)

    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()
    try:
        for _ in range(30):
            view = state.view()
            helper = threading.Thread(target=view.complete_copy, daemon=True)
            helper.start()
            view.compute_digests()
            view.complete_copy()
            helper.join(10)
            digest, view._digests = view.digest, ()
            view.compute_digests()
            assert view.digest == digest, "what was read live is what was copied"
            view.close()
    finally:
        stop.set()
        trainer.join(10)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=repr
)
def test_without_memory_for_the_copy_readers_fail_and_the_trainer_continues(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = made()
    view = state.view()

    def full(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(view, "_copy_live", full)
    move(state)
    assert state.epoch == 1
    with pytest.raises(PeerError, match="open the state again"):
        view.chunk(0)


def test_a_read_without_waiting_uses_live_memory_unless_a_writer_has_the_lock() -> None:
    state = made()
    expected = bytes(state.snapshot().blob)
    view = state.view()
    at_once = [view.chunk_without_waiting(index) for index in range(view.chunks)]
    assert b"".join(bytes(chunk) for chunk in at_once if chunk is not None) == expected
    held, done = threading.Event(), threading.Event()

    def write() -> None:
        with state.reading:
            held.set()
            done.wait(10)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert held.wait(10)
    assert view.chunk_without_waiting(0) is None
    done.set()
    writer.join(10)
    view.close()
    assert view.chunk_without_waiting(0) is None, "what is closed may have changed"


@pytest.mark.parametrize("copied", [0, 2, 100])
def test_chunks_are_the_same_with_and_without_waiting(copied: int) -> None:
    state = made()
    view = state.view()
    with state.reading:
        view.complete_copy_locked(copied)
    for index in range(view.chunks):
        chunk = view.chunk(index)
        assert isinstance(chunk, bytes)
        assert len(chunk) == min(CHUNK_BYTES, view.total_bytes - index * CHUNK_BYTES)
        assert view.chunk_without_waiting(index) == chunk
