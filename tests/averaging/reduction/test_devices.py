"""Rounds over tensors on accelerators: the calls to streams, and that nothing is read before it has arrived.

Where there is no GPU, `LateQueue` is one: its copies come when they are waited for. Tests with a GPU are in
`tests/gpu`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from averaging.allreduce.kernels import Averaged, ReductionKernels
from averaging.allreduce.logic.versions import Version, encode_places
from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.devices import CudaQueue, PlainQueue, Queues, queue_of
from averaging.reduction.feedback import Feedback
from averaging.reduction.framing import unpack
from averaging.reduction.partition import Chunk, plan_chunks
from averaging.reduction.reduce import Contribution, ReductionJob
from averaging.reduction.staging import Staging
from averaging.reduction.vector import HOST, FlatVector
from swarm.compression import find, names
from swarm.testing.devices import LateQueue

SHAPES = [(3000,), (40, 50), (), (0,), (70, 100), (9000,)]
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES)


class FakeCuda:
    """The part of `torch.cuda` that queues use: each stream knows which calls are complete before its next
    one.
    """

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device, self.known = device, set[str]()
            self.synchronized = 0

        def wait_event(self, event: FakeCuda.Event) -> None:
            self.known |= event.known

        def synchronize(self) -> None:
            self.synchronized += 1

    class Event:
        def __init__(self, waited: list[set[str]], blocking: bool) -> None:
            self.waited = waited
            assert blocking, "a thread that spins takes a core from the trainer"
            self.known: set[str] = set()
            self.synchronized = False

        def record(self, stream: FakeCuda.Stream) -> None:
            self.known = set(stream.known)

        def synchronize(self) -> None:
            self.synchronized = True
            self.waited.append(self.known)

    def __init__(self) -> None:
        self.waited: list[set[str]] = []  # calls that were complete when a thread continued
        self.Event = functools.partial(FakeCuda.Event, self.waited)
        self.default = self.Stream(torch.device("cpu"))
        self._now = self.default
        self.entered: list[FakeCuda.Stream] = []

    def current_stream(self, device: torch.device) -> FakeCuda.Stream:
        return self._now

    @contextlib.contextmanager
    def stream(self, stream: FakeCuda.Stream) -> Iterator[None]:
        before, self._now = self._now, stream
        self.entered.append(stream)
        yield
        self._now = before

    def call(self, name: str) -> None:
        self._now.known = {*self._now.known, name}


def test_a_queue_orders_the_calls_of_its_streams() -> None:
    cuda = FakeCuda()
    queue = CudaQueue(torch.device("cpu"), cuda)
    cuda.call("backward")
    queue.fork()
    cuda.call("next forward")
    with queue.working():
        working = cuda.current_stream(torch.device("cpu"))
        assert working is not cuda.default
        assert "backward" in working.known
        assert "next forward" not in working.known  # the trainer continues during the round
        cuda.call("encode 1")
    source, target = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    fetch: Any = queue.fetch(source, target)
    copies = cuda.entered[-1]
    assert copies not in (working, cuda.default)
    assert "encode 1" in copies.known
    with queue.working():
        cuda.call("encode 2")
    assert "encode 2" not in copies.known  # concurrent with the copy
    fetch.wait()
    assert fetch.event.synchronized
    assert fetch.event.known >= {"backward", "encode 1"}
    assert fetch.kept is source  # alive until the copy is over
    assert torch.equal(target, source)
    default, waited = cuda.default, cuda.waited
    queue.finish()
    assert waited == [fetch.event.known, working.known, copies.known]  # by events, which let the thread sleep
    assert not any(stream.synchronized for stream in (default, working, copies))
    assert "next forward" not in set().union(*waited)  # nobody waits for the trainer


@pytest.mark.parametrize("slots", [2, 5])
def test_uploads_take_no_more_memory_than_their_ring_however_far_the_trainer_lags(slots: int) -> None:
    cuda = FakeCuda()
    queue = CudaQueue(torch.device("cpu"), cuda)
    assert queue.upload(torch.zeros(1, dtype=torch.uint8)) is None  # nothing was reserved
    queue.reserve(100, slots)
    ahead: list[Any] = []
    source = torch.arange(100, dtype=torch.uint8)
    while (upload := queue.upload(source)) is not None:
        ahead.append(upload)
    assert len(ahead) == slots
    uploads = cuda.entered[-1]
    memory: dict[int, list[int]] = {}
    for nth in range(50):  # calls on the trainer's stream may still be pending
        upload = ahead.pop(0) if ahead else queue.upload(source)
        assert upload is not None
        if nth >= slots:
            # the copy waits, on the device, until the slot's last content was read
            assert f"decode {nth - slots}" in uploads.known
            assert f"decode {nth - slots + 1}" not in uploads.known
        with cuda.stream(uploads):
            cuda.call(f"copy {nth + slots}")
        with upload.ready() as payload:
            assert torch.equal(payload, source)
            cuda.call(f"decode {nth}")
            memory.setdefault(payload.data_ptr(), []).append(nth)
    assert len(memory) == slots
    assert max(memory) - min(memory) < 256 * slots
    assert not cuda.waited
    queue.finish_uploads()
    assert len(cuda.waited) == 1
    assert "copy 50" in cuda.waited[0]


def test_the_trainers_stream_waits_for_an_upload_and_its_thread_does_not() -> None:
    cuda = FakeCuda()
    queue = CudaQueue(torch.device("cpu"), cuda)
    queue.reserve(8, 2)
    upload = queue.upload(torch.zeros(8, dtype=torch.uint8))
    uploads = cuda.entered[-1]
    with cuda.stream(uploads):
        cuda.call("the first copy")
    second = queue.upload(torch.zeros(8, dtype=torch.uint8))
    assert upload is not None
    assert second is not None
    with second.ready():
        assert "the first copy" in cuda.default.known
    assert not cuda.waited
    queue.reserve(8, 2)  # the next round: the first upload was never read, and its slot is free again
    assert queue.upload(torch.zeros(8, dtype=torch.uint8)) is not None
    assert queue.upload(torch.zeros(8, dtype=torch.uint8)) is not None
    assert queue.upload(torch.zeros(8, dtype=torch.uint8)) is None


def test_the_host_has_no_queue_and_unknown_devices_get_a_plain_one() -> None:
    assert queue_of(HOST) is None
    assert not Queues([HOST])
    assert isinstance(queue_of(torch.device("meta")), PlainQueue)
    queue = PlainQueue(HOST)
    target = torch.zeros(3)
    queue.fetch(torch.ones(3), target).wait()
    assert target.tolist() == [1, 1, 1]
    upload = queue.upload(target)
    assert upload is not None
    with queue.working(), upload.ready() as there:
        assert there is target
    assert queue.host_memory(3, torch.uint8).numel() == 3
    queue.fork()
    queue.reserve(12, 1)
    queue.finish()
    queue.finish_uploads()


@pytest.mark.parametrize(
    "sizes", [[1000] * 3000, [1 << 16] * 33, [900], [700, 3, 900, 1 << 20, 5], []], ids=len
)
def test_pinned_memory_of_averages_is_hardly_larger_than_they_are_and_is_used_again(sizes: list[int]) -> None:
    queues, queue = late()
    result_buffer = ResultBuffer(queues)
    places = result_buffer.room(sizes)
    assert [place.numel() for place in places] == sizes
    for nth, place in enumerate(places):
        place.fill_(nth % 251)
    assert all(bool((place == nth % 251).all()) for nth, place in enumerate(places))  # none lies on another
    blocks = {place.untyped_storage().data_ptr(): place.untyped_storage().nbytes() for place in places}
    assert all(size.bit_count() == 1 for size in blocks.values())  # as torch would round them up to
    assert sum(blocks.values()) <= 1.2 * sum(sizes) + max(sizes, default=0)
    before = len(queue.host_allocations)
    assert [place.data_ptr() for place in result_buffer.room(sizes)] == [place.data_ptr() for place in places]
    result_buffer.room(sizes[: len(sizes) // 2])
    assert len(queue.host_allocations) == before == len(blocks)


class HalfThere(FlatVector):
    """A vector of which every other chunk seems to lie on the host, or on two devices."""

    def device_of(self, start: int, stop: int) -> torch.device:
        return torch.device("meta") if start // 4096 % 2 else HOST


def late() -> tuple[Queues, LateQueue]:
    queues = Queues([HOST], LateQueue)
    queue = queues.of(HOST)
    assert isinstance(queue, LateQueue)
    return queues, queue


def tensors(seed: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=chance) for shape in SHAPES]


def kernels(
    vector: FlatVector, codec: str, feedback: Feedback | None, result_buffer: ResultBuffer
) -> ReductionKernels:
    plan = plan_chunks(NUMEL, [1.0, 1.0], find(codec), 4096)
    found = ReductionKernels(
        plan, find(codec), 0, vector, Averages(plan, find(codec), result_buffer), weights=(1.0, 1.0)
    )
    found.feedback = feedback.begin() if feedback is not None else None
    return found


def everything(work: ReductionKernels) -> dict[str, Any]:
    """All that a round makes of a vector: our messages, the average of our shard with another's values, what
    error feedback keeps.
    """
    mine, theirs = (work.plan.shard(place) for place in (0, 1))
    sent = [message for at in range(0, len(theirs), 2) for message in work.encode(theirs[at : at + 2])]
    assert all(isinstance(message, bytes) for message in sent)
    other = work.codec
    chance = torch.Generator().manual_seed(99)
    done = []
    for chunk in mine:
        values = torch.randn(chunk.numel, generator=chance)
        payload = bytes(
            other.encode(values, torch.empty(other.encoded_bytes(chunk.numel), dtype=torch.uint8))
        )
        contributions = [Contribution(0, 1.0, work.own_values(chunk)), Contribution(1, 1.0, payload)]
        (averaged,) = work.reduce([ReductionJob(chunk, contributions)])
        assert isinstance(averaged, Averaged)
        done.append(averaged.digest)
    for chunk, message in zip(theirs, sent, strict=True):
        assert isinstance(message, bytes)
        work.averages.keep(chunk, unpack(message)[1])
    return {"sent": sent, "digests": done, "again": work.encoded(theirs[0])}


@pytest.mark.parametrize("codec", sorted(set(names())))
@pytest.mark.parametrize("fed", [False, True])
def test_a_round_makes_the_same_bytes_when_copies_arrive_late(codec: str, fed: bool) -> None:
    queues, queue = late()
    here, there = Staging(tensors(1)), Staging(tensors(1), queues)
    cut = there.cut
    feedback = (
        [Feedback(NUMEL, find(codec)), Feedback(NUMEL, find(codec), cut=cut, queues=queues)]
        if fed
        else [None, None]
    )
    result_buffers = [ResultBuffer(), ResultBuffer(queues)]
    for _ in range(2):
        works = [
            kernels(staging.take(read_in_place=True), codec, fed_back, result_buffer)
            for staging, fed_back, result_buffer in zip((here, there), feedback, result_buffers, strict=True)
        ]
        assert everything(works[0]) == everything(works[1])
        assert queue.under_way == 0
        states = []
        for work, staging, fed_back in zip(works, (here, there), feedback, strict=True):
            if fed_back is not None:
                everybody = encode_places((0, 1), 2)
                # the last one was made without us
                held = {chunk.index: Version(0, everybody, b"") for chunk in work.plan.chunks[:-1]}
                work.conclude(held)
                states.append(fed_back.state_dict()["sender"])
            staging.put(work.averages)
        assert all(torch.equal(one, other) for one, other in zip(here.tensors, there.tensors, strict=True))
        assert all(torch.equal(state, states[0]) for state in states)
    assert queue.forks >= 2
    result_buffers[1].room([])  # as the next round does: nothing has changed what was being copied


def test_chunks_of_several_devices_are_put_together_on_the_host() -> None:
    queues = Queues([torch.device("meta")], LateQueue)
    pieces = [tensor.view(-1) for tensor in tensors(3)]
    queues.fork()
    mixed, plain = HalfThere(pieces, queues), FlatVector(pieces)
    found = everything(kernels(mixed, "int8", None, ResultBuffer()))
    work = kernels(plain, "int8", None, ResultBuffer())
    assert found == everything(work)
    targets = [torch.zeros(NUMEL) for _ in range(2)]
    work.averages.write(HalfThere([targets[0]], queues))
    work.averages.write(FlatVector([targets[1]]))
    assert torch.equal(targets[0], targets[1])
    work.averages.subtract(HalfThere([targets[0]], queues))
    assert float(targets[0].abs().max()) == 0.0


def test_values_that_cannot_be_sent_are_found_on_devices() -> None:
    queues, queue = late()
    mine = tensors(1)
    mine[-1][5000] = float("nan")
    work = kernels(Staging(mine, queues).take(read_in_place=True), "int8", None, ResultBuffer(queues))
    chunks = work.plan.shard(1)
    messages = work.encode(chunks)
    assert messages[-1] == NUMEL - 9000 + 5000
    assert queue.under_way == 0  # those behind it were waited for: their memory is used again
    work.exclude_self(int(messages[-1]))
    assert "nan" in str(work.excluded_reason)


@pytest.mark.parametrize("nth", [0, 1, 7])
def test_decoding_that_runs_out_of_memory_first_leaves_the_tensors_as_they_were(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues, _ = late()
    staging, codec = Staging(tensors(1), queues), find("int8")
    work = kernels(staging.take(read_in_place=True), "int8", None, ResultBuffer(queues))
    everything(work)
    before, decode, calls = [tensor.clone() for tensor in staging.tensors], codec.decode, iter(range(99))

    def decode_half_if_there_is_no_room(payload: Any, scratch: torch.Tensor) -> torch.Tensor:
        values = decode(payload, scratch)
        if next(calls) == nth:
            scratch[scratch.numel() // 2 :] = float("nan")
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return values

    monkeypatch.setattr(type(codec), "decode", lambda _, *given: decode_half_if_there_is_no_room(*given))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        staging.put(work.averages)
    assert work.averages.written == (nth > 0)
    unchanged = all(torch.equal(one, other) for one, other in zip(staging.tensors, before, strict=True))
    assert unchanged == (nth == 0)


def test_differences_arrive_on_devices() -> None:
    queues, _ = late()
    here, there = Staging(tensors(1)), Staging(tensors(1), queues)
    plan = plan_chunks(NUMEL, [1.0], find("float16"), 4096)
    for staging in (here, there):
        staging.take(read_in_place=False)
        averages = Averages(plan, find("float16"), ResultBuffer(staging.queues))
        for chunk in plan.chunks:
            values = torch.linspace(-1, 1, chunk.numel)
            averages.keep(
                chunk, find("float16").encode(values, torch.empty(2 * chunk.numel, dtype=torch.uint8))
            )
        averages.mark_empty(plan.chunks[1])
        for tensor in staging.tensors:
            tensor.mul_(3.0)
        staging.add_difference(averages)
        staging.put(averages)  # chunks without an average stay as they are
    assert all(torch.equal(one, other) for one, other in zip(here.tensors, there.tensors, strict=True))


def test_the_copies_of_a_staging_lie_by_device() -> None:
    mine = [torch.randn(4), torch.randn(3, 5).t(), torch.randn(6).to(torch.float16), torch.randn(7)]
    staging = Staging(mine)
    assert staging.cut == [(32, HOST)]
    read_in_place = staging.take(read_in_place=True)
    # flat ones are read where they are
    assert [piece.numel() for _, piece in read_in_place.pieces(0, 32)] == [4, 21, 7]
    assert len(list(staging.take(read_in_place=False).pieces(0, 32))) == 1
    assert torch.equal(read_in_place.read(0, 32), staging.take(read_in_place=False).read(0, 32))


def test_a_chunk_knows_its_device() -> None:
    vector = FlatVector([torch.zeros(5), torch.zeros(5)])
    assert vector.device_of(0, 10) == vector.device_of(0, 0) == HOST
    assert Chunk(0, 0, 0, 10).numel == vector.numel


def test_working_before_a_fork_is_refused() -> None:
    """The stand-in itself must be able to fail."""
    queues, queue = late()
    with pytest.raises(AssertionError, match="after a fork"), queues.working():
        pass
    queue.fork()
    target = torch.zeros(2)
    fetch = queue.fetch(torch.ones(2), target)
    assert target.tolist() != [1, 1]
    fetch.wait()
    assert target.tolist() == [1, 1]
    queue.reserve(2, 1)
    source = torch.ones(2, dtype=torch.uint8)
    upload = queue.upload(source)
    assert upload is not None
    with upload.ready() as there:
        assert there.tolist() == [1, 1]
    assert there.tolist() != [1, 1]  # its memory belongs to the next one
    source.zero_()
    with pytest.raises(AssertionError, match="changed while"):
        queue.finish_uploads()
