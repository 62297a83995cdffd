"""Copies between a device and the host: the order of calls to CUDA, and the size of the pinned memory."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from averaging.optim.memory import Fragment
from averaging.optim.offload import HostStaging, OffloadLink, OffloadLinks, block_sizes, link_of
from tests.averaging.optim.late import LateLink

HOST = torch.device("cpu")


class FakeCuda:
    """A replacement for `torch.cuda`, as far as a link uses it. Each stream knows which calls come before
    its next one.
    """

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.known: set[str] = set()

        def wait_event(self, event: FakeCuda.Event) -> None:
            self.known |= event.known

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking, "a thread that spins takes a core from the trainer"
            self.known: set[str] = set()
            self.synchronized = 0

        def record(self, stream: FakeCuda.Stream) -> None:
            self.known = set(stream.known)

        def query(self) -> bool:
            return self.synchronized > 0

        def synchronize(self) -> None:
            self.synchronized += 1

    def __init__(self) -> None:
        self.default = self.now = self.Stream(HOST)
        self.entered: list[FakeCuda.Stream] = []

    def current_stream(self, device: torch.device) -> FakeCuda.Stream:
        return self.now

    @contextlib.contextmanager
    def stream(self, stream: FakeCuda.Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        self.entered.append(stream)
        self.call(f"copy {len(self.entered)}")
        yield
        self.now = before

    def call(self, name: str) -> None:
        self.now.known = {*self.now.known, name}


def test_a_link_orders_copies_and_the_trainers_stream_both_ways() -> None:
    cuda = FakeCuda()
    link = OffloadLink(HOST, cuda)
    cuda.call("backward")
    source, target = torch.arange(4.0), torch.zeros(4)
    arrival: Any = link.fetch([(source, target)])
    copies = cuda.entered[-1]
    assert copies is not cuda.default
    assert "backward" in copies.known
    assert "copy 1" not in cuda.default.known, "what is queued next may run during the copy"
    cuda.call("forward")
    assert not arrival.ready()
    arrival.wait()
    assert arrival.ready()
    assert arrival.event.known >= {"backward", "copy 1"}
    assert "forward" not in arrival.event.known
    assert torch.equal(target, source)
    link.release()
    assert "copy 1" in cuda.default.known
    cuda.call("step")
    link.upload([(target, source)])
    assert "step" in copies.known, "the memory on the device may have been in use"
    assert "copy 2" in cuda.default.known
    assert cuda.entered == [copies, copies]


def test_the_host_and_devices_without_streams_have_no_link() -> None:
    assert link_of(HOST) is None
    assert link_of(torch.device("meta")) is None
    assert not OffloadLinks([torch.zeros(1)])
    both = [torch.zeros(1), torch.empty(1, device="meta")]
    assert not OffloadLinks(both, lambda device: LateLink(device) if device == HOST else None), (
        "all devices, or none"
    )


@pytest.mark.parametrize(
    "numel", [0, 1, 1000, (1 << 18) + 1, 3_000_001, 999_999_999, (1 << 30) + (1 << 20), 7_000_000_000]
)
def test_pinned_blocks_are_powers_of_two_and_hardly_larger_than_their_contents(numel: int) -> None:
    sizes = block_sizes(numel)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert numel <= sum(sizes) < numel + (1 << 18)
    assert len(sizes) <= 34


@pytest.mark.parametrize("seed", range(8))
def test_staged_values_come_back_whatever_the_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("averaging.optim.offload._BLOCK_ELEMENTS_MIN", 4)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16]
    tensors = [torch.randn(rng.randint(0, 40)).to(rng.choice(dtypes)) for _ in range(12)]
    pinned: list[torch.Tensor] = []

    class Counting(LateLink):
        def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
            pinned.append(super().host_memory(numel, dtype))
            return pinned[-1]

    staging = HostStaging(tensors, OffloadLinks(tensors, Counting))
    assert sum(block.nbytes for block in pinned) < sum(one.nbytes for one in tensors) + 2 * 4 * 4
    for _ in range(3):
        chosen = rng.sample(range(12), 7)
        pieces = [
            Fragment(place, start, rng.randint(start, tensors[place].numel()))
            for place in chosen
            for start in [0, 1]
            if tensors[place].numel()
        ]
        pieces = list({piece.place: piece for piece in pieces}.values())
        sources = [tensors[piece.place][piece.start : piece.stop].clone() for piece in pieces]
        then = [source.clone() for source in sources]
        staging.fetch(list(zip(pieces, sources, strict=True)))
        for source in sources:
            source.zero_()  # the trainer's stream continues after the copies
        staging.wait()
        for piece, values in zip(pieces, then, strict=True):
            found = [memory for _, _, memory in staging.fetched_values(piece)]
            assert torch.equal(torch.cat([values[:0], *found]), values)
        targets = [torch.zeros_like(source) for source in sources]
        staging.upload(
            (piece, values.double(), target)
            for piece, values, target in zip(pieces, then, targets, strict=True)
        )
        assert all(torch.equal(target, values) for target, values in zip(targets, then, strict=True))
