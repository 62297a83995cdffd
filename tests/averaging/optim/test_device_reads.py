"""Views of a state on a device: each shows one moment in every order that CUDA allows, copies each byte
once, and makes no other thread wait.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from averaging.optim.state import checkpoint, device_reads
from averaging.optim.state.device_reads import CudaReader, PlainReader
from averaging.optim.state.donor import Donor
from averaging.optim.state.snapshot import CHUNK_BYTES, digests_of, snapshot_digest
from averaging.optim.state.training_state import TrainingState
from averaging.optim.state.view import StateView
from swarm.core.clock import SystemClock
from swarm.core.errors import PeerError, SwarmError
from swarm.core.ids import Contact, PeerId
from swarm.testing.simulated_node import SimulatedNode
from swarm.wire import state_pb2
from tests.averaging.optim.simulated_cuda import HOST, SimulatedCuda

OUT_OF_MEMORY = [
    MemoryError(),
    torch.cuda.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: out of memory"),
]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_reads, "WINDOW_BYTES", 2 * CHUNK_BYTES)


def on_host(device: torch.device) -> None:
    return None


def made(make_reader: Callable[[torch.device], Any] = on_host, optimizer: str = "sgd") -> TrainingState:
    """Return a state of a little over nine chunks: tensors that cross chunks, tiny and empty ones, and one
    that is not contiguous.
    """
    torch.manual_seed(1)
    sizes = (3 * CHUNK_BYTES // 4 + 777, 5, 0, 1)
    values = [torch.randn(size) for size in sizes] + [
        torch.randn(3, 4).t(),
        torch.randn(1001, 1500).t(),
        torch.randn(7).bfloat16(),
    ]
    parameters = [torch.nn.Parameter(value) for value in values]
    inner: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.1)
    if optimizer == "adam":
        inner = torch.optim.Adam(parameters[:5], lr=0.1, fused=True)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        inner.step()
    return TrainingState(inner, [torch.arange(5)], make_reader=make_reader)


def add_one(state: TrainingState) -> None:
    with torch.no_grad():
        for parameter in state.parameters:
            parameter.add_(1.0)


def write(state: TrainingState, cuda: SimulatedCuda, *, moved_first: bool = False) -> None:
    """Queue an optimizer's step on a device; it is executed when the device comes to it."""
    with state.lock:
        if moved_first:
            state.mark_changed(state.epoch + 1)
        cuda.launch(lambda: add_one(state))
        if not moved_first:
            state.mark_changed(state.epoch + 1)


def blob_of(view: StateView) -> bytes:
    return b"".join(view.chunk(index) for index in range(view.chunks))


@pytest.mark.parametrize("seed", range(12))
def test_a_view_keeps_one_state_in_whatever_order_streams_execute(seed: int) -> None:
    chance = random.Random(seed)
    cuda = SimulatedCuda(seed, eager=chance.choice([0.0, 0.3, 0.7, 0.9]))
    state, twin = made(cuda.reader), made()
    trainers = chance.choice([cuda.default, cuda.Stream(HOST)])
    views: list[tuple[StateView, bytes]] = []
    with cuda.stream(trainers):
        write(state, cuda)
    for _ in range(6):
        with twin.lock:
            add_one(twin)
            twin.mark_changed(twin.epoch + 1)
        expected = bytes(twin.snapshot().blob)
        if chance.random() < 0.7:
            view = state.view()
            views.append((view, expected))
            for index in range(chance.choice([0, 0, 1, 3, view.chunks])):
                assert view.chunk(index) == expected[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        if views and chance.random() < 0.5:
            chance.choice(views)[0].compute_digests()
        with cuda.stream(trainers):
            write(state, cuda, moved_first=chance.random() < 0.5)
    for view, expected in views:
        assert blob_of(view) == expected
        assert view.is_copied
        view.compute_digests()
        assert view.digest == digest_of(expected)


def digest_of(blob: bytes) -> bytes:
    return snapshot_digest(len(blob), digests_of(memoryview(blob)))


@pytest.mark.parametrize("seed", range(2))
def test_readers_in_threads_see_one_moment_beside_a_trainer(seed: int) -> None:
    cuda = SimulatedCuda(seed, eager=0.5)
    state = made(cuda.reader)
    stop = threading.Event()

    def train() -> None:
        with cuda.stream(cuda.Stream(HOST)):
            while not stop.is_set():
                write(state, cuda)

    trainer = threading.Thread(target=train, daemon=True)
    trainer.start()
    try:
        for _ in range(8):
            view = state.view()
            helper = threading.Thread(target=view.complete_copy, daemon=True)
            helper.start()
            view.compute_digests()
            helper.join(20)
            assert not helper.is_alive()
            tensors = [view.tensor(place) for place in range(len(view.names))]
            moved = {
                round(float(t.float().flatten()[0] - start), 2)
                for t, start in zip(tensors[:5], first_values(), strict=True)
                if t.numel()
            }
            assert moved == {float(view.epoch)}
            view.close()
    finally:
        stop.set()
        trainer.join(20)


def first_values() -> list[float]:
    return [
        float(parameter.detach().flatten()[0]) if parameter.numel() else 0.0
        for parameter in made().parameters[:5]
    ]


def test_each_byte_is_copied_once_for_hashes_two_downloads_a_file_and_a_write(tmp_path: Path) -> None:
    cuda = SimulatedCuda(1)
    state = made(cuda.reader)
    view = state.view()
    view.compute_digests()
    first, second = blob_of(view), blob_of(view)
    assert first == second == bytes(made().snapshot().blob)
    path = checkpoint.Checkpoints(tmp_path).save(view, [str(place) for place in range(len(view.names))])
    assert bytes(checkpoint.read(path).blob) == first
    write(state, cuda)
    assert blob_of(view) == first
    assert cuda.transferred_bytes == sum(tensor.nbytes for tensor in (*state.parameters, *state.extras))


def test_host_memory_in_transit_is_two_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    plain = CudaReader.host_memory

    def counted(self: CudaReader, size: int) -> Any:
        asked.append(size)
        return plain(self, size)

    monkeypatch.setattr(CudaReader, "host_memory", counted)
    cuda = SimulatedCuda(1)
    state = made(cuda.reader)
    view = state.view()
    asked.clear()  # of counters
    write(state, cuda)
    view.compute_digests()
    assert asked == [2 * CHUNK_BYTES] * 2


def test_a_reader_waits_for_the_device_without_the_lock_and_a_writer_after_it_not_at_all() -> None:
    cuda = SimulatedCuda(1)
    state = made(cuda.reader)
    view = state.view()
    free: list[bool] = []

    def another_thread_gets_the_lock() -> None:
        def attempt() -> bool:
            found = state.reading.acquire(blocking=False)
            if found:
                state.reading.release()
            return found

        with ThreadPoolExecutor(1) as other:
            free.append(other.submit(attempt).result())

    cuda.on_wait = another_thread_gets_the_lock
    view.compute_digests()
    assert len(free) >= view.chunks // 2
    assert all(free)
    free.clear()
    write(state, cuda)
    assert not free, "everything was copied: the writer has nothing to wait for on the host"
    half = state.view()
    half.chunk(0)  # two windows were asked for by that, of five
    free.clear()
    write(state, cuda)
    assert len(free) == 2, (
        "three windows were not asked for, and one buffer was free; the last two arrive by themselves"
    )
    free.clear()
    half.compute_digests()
    assert free == [True, True]


def donor_of(state: TrainingState, pool: ThreadPoolExecutor) -> Donor:
    """Return a donor in this thread's event loop; it publishes no record."""

    def own() -> Contact:
        return Contact(PeerId(bytes(32)), ())

    node = SimulatedNode(own, SystemClock(), None, pool=pool)
    donor = Donor(node, "run", state)
    donor.start()
    return donor


class _Stream:
    """One request of a joiner, and the replies to it."""

    def __init__(self, peer_id: Any) -> None:
        self.peer_id = peer_id
        self.sent: list[bytes] = []

    async def send(self, message: bytes) -> None:
        self.sent.append(message)

    async def receive(self) -> bytes | None:
        return None


def test_a_donor_waits_for_the_device_only_in_the_pool_and_copies_once_for_two_joiners() -> None:
    cuda = SimulatedCuda(1)
    state = made(cuda.reader)
    waiting: set[threading.Thread] = set()
    cuda.on_wait = lambda: waiting.add(threading.current_thread())
    expected = bytes(made().snapshot().blob)

    async def main() -> list[bytes]:
        with ThreadPoolExecutor(2) as pool:
            donor = donor_of(state, pool)
            got = []
            for name in ("one", "other"):
                peer: Any = name
                reply = await donor.on_open(peer, state_pb2.OpenRequest(run="run"))
                stream: Any = _Stream(peer)
                indices = range(-(-reply.total_bytes // CHUNK_BYTES))
                await donor.on_chunks(
                    state_pb2.ChunksRequest(run="run", lease=reply.lease, indices=indices), stream
                )
                got.append(b"".join(stream.sent))
            return got

    assert asyncio.run(main()) == [expected, expected]
    assert waiting
    assert threading.main_thread() not in waiting
    assert cuda.transferred_bytes == sum(tensor.nbytes for tensor in (*state.parameters, *state.extras))


def test_counters_on_a_device_come_in_one_transfer() -> None:
    cuda = SimulatedCuda(1)
    state, twin = made(cuda.reader, "adam"), made(optimizer="adam")
    assert state.counters_digest() == twin.counters_digest()
    assert cuda.transfers == 1
    assert state.view().header == twin.view().header
    assert cuda.transfers == 2
    assert state.view().header["state"]["0"] == {"step": 1.0}
    assert state.snapshot().digest == twin.snapshot().digest
    assert state.extra_counts() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_numbers_read_from_a_device_equal_those_of_item(dtype: torch.dtype) -> None:
    tensors = [torch.tensor(value).to(dtype) for value in (1.5, 0.0, 7.25)] + [
        torch.tensor(True),
        torch.tensor([1 << 40]),
    ]
    reads = device_reads.DeviceReads([HOST], SimulatedCuda(1).reader)
    found = reads.numbers(tensors)
    assert found == [tensor.item() for tensor in tensors]
    assert [type(one) for one in found] == [type(tensor.item()) for tensor in tensors]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
@pytest.mark.parametrize("place", ["host_memory", "flat"])
def test_without_memory_readers_fail_and_the_trainer_continues(
    error: Exception, place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cuda = SimulatedCuda(1)
    state = made(cuda.reader)
    views = [state.view() for _ in range(3)]

    def full(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(CudaReader, place, full)
    with pytest.raises(PeerError, match="open the state again"):
        views[0].compute_digests()
    with pytest.raises(SwarmError, match="could not be written: there is no memory"):
        checkpoint.write(views[1], tmp_path / "x", [str(number) for number in range(10)])
    write(state, cuda)
    assert state.epoch == 1
    with pytest.raises(PeerError, match="open the state again"):
        views[2].chunk(0)
    monkeypatch.undo()
    assert blob_of(state.view())


@pytest.mark.parametrize("place", ["host_memory", "flat"])
def test_a_donor_without_memory_refuses_and_leaves_the_writer_nothing_to_copy(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = SimulatedCuda(1)
    state = made(cuda.reader, "adam")

    def full(*arguments: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            peer: Any = "one"
            await donor_of(state, pool).on_open(peer, state_pb2.OpenRequest(run="run"))

    monkeypatch.setattr(CudaReader, place, full)
    with pytest.raises(PeerError, match=r"memory|open the state again"):
        asyncio.run(main())
    monkeypatch.undo()
    write(state, cuda)
    assert cuda.transfers == 0


def test_a_device_without_streams_is_read_through_the_same_windows() -> None:
    state = made(lambda device: PlainReader())
    view, expected = state.view(), bytes(made().snapshot().blob)
    with state.lock:
        add_one(state)
    assert blob_of(view) == expected


class Elsewhere(torch.Tensor):
    """A tensor that pretends to be on another device than the other tensors."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")


def test_a_state_partly_on_the_host_is_copied_whole() -> None:
    """Some tensors are read by the device's reader, others directly, and both before a write."""
    cuda = SimulatedCuda(1)
    values = [torch.arange(float(n)) for n in (400_000, 3, 300_000)]
    plain = TrainingState(torch.optim.SGD([torch.nn.Parameter(value) for value in values], lr=0.1))
    there = [torch.Tensor._make_subclass(Elsewhere, value.clone(), True) for value in values[:2]]
    mixed = torch.optim.SGD([*there, torch.nn.Parameter(values[2].clone())], lr=0.1)
    state = TrainingState(mixed, make_reader=lambda device: None if device == HOST else cuda.reader(device))
    view, expected = state.view(), bytes(plain.snapshot().blob)
    view.chunk(0)
    with state.lock:
        cuda.launch(lambda: add_one(state))
    assert blob_of(view) == expected
    assert cuda.transferred_bytes == 4 * 400_003
