"""Steps whose samples do not fit into memory at once: micro-batches give the gradient of the full batch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from averaging.optim.progress.logic.view import PeerProgress, ProgressView
from swarm.core.errors import SwarmError
from swarm.core.ids import PeerId
from swarm.run.events import Event
from swarm.run.microbatches import MicroBatches, StepSize
from swarm.run.task import Draw

CPU = torch.device("cpu")
OWN, OTHER = PeerId(bytes(32)), PeerId(bytes([1]) * 32)


@pytest.fixture(autouse=True)
def few_objects() -> Iterator[None]:
    """Let the collections that follow a lack of memory visit the objects of the test alone, not those of all
    modules and earlier tests.
    """
    gc.freeze()
    yield
    gc.unfreeze()


def out_of_memory() -> BaseException:
    return torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise out_of_memory()


class LittleMemory:
    """Data on a device that has memory for `fits` samples. A larger batch fails in `where`."""

    summary = "random numbers"

    def __init__(
        self, seed: int, fits: int, where: str = "forward", error: Callable[[], BaseException] = out_of_memory
    ) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._fits, self._where, self._error = fits, where, error
        self.batches: list[torch.Tensor] = []  # drawn
        self.alive: list[weakref.ref[torch.Tensor]] = []  # activations

    def start_epoch(self, draw: Draw) -> None:
        return None

    def loss(self, model: torch.nn.Module, samples: int) -> torch.Tensor:
        batch = torch.randn(samples, 3, generator=self._generator, dtype=torch.float64)
        self.batches.append(batch)
        hidden = model(batch)
        self.alive.append(weakref.ref(hidden))
        if samples > self._fits:
            if self._where == "forward":
                raise self._error()
            hidden = _FailsInBackward.apply(hidden)
        return cast(torch.Tensor, hidden.pow(2).mean())

    def validation_loss(self, model: torch.nn.Module) -> float:
        return 0.0


def make_micro_batches(data: LittleMemory) -> tuple[MicroBatches, torch.nn.Module, list[Event]]:
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    emitted: list[Event] = []
    return MicroBatches(model=model, data=data, device=CPU, emit=emitted.append), model, emitted


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("samples", "fits", "sizes"),
    [(8, 8, [8]), (8, 7, [4, 4]), (8, 2, [2, 2, 2, 2]), (7, 3, [2, 2, 2, 1]), (5, 1, [1] * 5)],
)
def test_gradient_and_loss_in_micro_batches_equal_those_of_the_full_batch(
    seed: int, where: str, samples: int, fits: int, sizes: list[int]
) -> None:
    data = LittleMemory(seed, fits, where)
    micro_batches, model, _ = make_micro_batches(data)
    losses = micro_batches.backward(samples, model.zero_grad)
    assert [count for count, _ in losses] == sizes

    batch = torch.cat(data.batches[-len(sizes) :])
    oracle = torch.nn.Linear(3, 1, dtype=torch.float64)
    oracle.load_state_dict(model.state_dict())
    loss = oracle(batch).pow(2).mean()
    loss.backward()
    for parameter, expected in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=1e-12)
    assert sum(count * float(one) for count, one in losses) / samples == pytest.approx(loss.item())


def test_the_next_step_starts_with_the_size_that_fitted() -> None:
    data = LittleMemory(0, 3)
    micro_batches, model, emitted = make_micro_batches(data)
    micro_batches.backward(8, model.zero_grad)
    drawn = len(data.batches)
    micro_batches.backward(8, model.zero_grad)
    assert [len(batch) for batch in data.batches[drawn:]] == [2, 2, 2, 2]
    assert [event.text for event in emitted if event.kind == "notice"] == [  # type: ignore[attr-defined]
        "a step does not fit into the memory of cpu: training with 4 samples at a time instead of 8",
        "a step does not fit into the memory of cpu: training with 2 samples at a time instead of 4",
    ]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_activations_and_gradients_of_the_failed_attempt_are_freed_before_the_next(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = LittleMemory(0, 4, where)
    micro_batches, model, _ = make_micro_batches(data)
    model.weight.grad = torch.ones_like(model.weight)
    alive: list[object] = []

    def released(device: torch.device) -> None:
        alive.extend(one() for one in data.alive)
        alive.extend(parameter.grad for parameter in model.parameters())

    monkeypatch.setattr("swarm.run.microbatches.release_cached_memory", released)
    gc.disable()  # memory must be freed without a garbage collection
    try:
        micro_batches.backward(8, model.zero_grad)
    finally:
        gc.enable()
    assert alive == [None, None, None]


def test_a_sample_that_does_not_fit_into_memory_fails_with_advice() -> None:
    micro_batches, model, _ = make_micro_batches(LittleMemory(0, 0))
    with pytest.raises(
        SwarmError,
        match="does not fit into the memory of cpu, even with one sample at a time: close other programs",
    ):
        micro_batches.backward(4, model.zero_grad)


def test_other_errors_of_a_task_are_not_treated_as_out_of_memory() -> None:
    micro_batches, model, emitted = make_micro_batches(
        LittleMemory(0, 1, error=lambda: RuntimeError("shapes cannot be multiplied"))
    )
    with pytest.raises(RuntimeError, match="shapes"):
        micro_batches.backward(4, model.zero_grad)
    assert emitted == []


@pytest.mark.parametrize("device", ["cuda:1", "mps"])
def test_the_cache_of_the_device_that_ran_out_is_emptied(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cuda"))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append("mps"))
    micro_batches, _, emitted = make_micro_batches(LittleMemory(0, 1))
    micro_batches.device = torch.device(device)
    micro_batches.shrink(4, "a step")
    assert emptied == [device.partition(":")[0]]
    assert device in emitted[0].text  # type: ignore[attr-defined]


def speeds(own_per_s: float, others_per_s: float, target: int = 320) -> ProgressView:
    peers = {
        peer: PeerProgress(epoch=3, samples=0, samples_per_s=speed, counted=0.0, age_s=0.0)
        for peer, speed in ((OWN, own_per_s), (OTHER, others_per_s))
    }
    return ProgressView(
        epoch=3,
        swarm_epoch=3,
        samples=0.0,
        target=target,
        samples_per_s=own_per_s + others_per_s,
        peers=peers,
    )


def test_steps_of_a_slow_machine_shrink_to_a_quarter_of_an_epoch() -> None:
    emitted: list[Event] = []
    size = StepSize(emit=emitted.append)
    assert size.next(8, speeds(0.0, 320.0), OWN) == 8, "before its speed is known"
    assert size.next(8, speeds(160.0, 160.0), OWN) == 8
    assert emitted == []
    assert size.next(8, speeds(8.0, 320.0), OWN) == 1
    assert size.next(8, speeds(0.1, 320.0), OWN) == 1, "one sample at least"
    assert [event.text for event in emitted if event.kind == "notice"] == [  # type: ignore[attr-defined]
        "a step of 8 samples takes this machine more than a quarter of an epoch: training with 1 at a time, "
        "so that they are ready in time for the rounds. The number follows the swarm's speed"
    ]


def test_steps_follow_the_length_of_the_epoch() -> None:
    emitted: list[Event] = []
    size = StepSize(emit=emitted.append)
    short, long = speeds(8.0, 312.0, target=160), speeds(8.0, 312.0, target=1600)
    assert [size.next(8, short, OWN) for _ in range(3)] == [1, 1, 1]
    assert [size.next(8, long, OWN) for _ in range(5)] == [2, 4, 4, 4, 4], "grows with a margin only"
    longer = speeds(8.0, 312.0, target=3200)
    assert [size.next(8, longer, OWN) for _ in range(2)] == [8, 8]
    assert size.next(4, longer, OWN) == 4, "a newer specification has smaller steps"
    assert len(emitted) == 1
