"""From a user's tensors to the flat vector and back, in place where that can be done, and what cannot be
averaged.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.partition import plan_chunks
from averaging.reduction.staging import Staging
from averaging.reduction.vector import FlatVector
from swarm.compression import Codec, find
from swarm.core.errors import UsageError
from tests.averaging.optim.allocations import Allocations

FLOAT32 = find("float32")


def averages_of(vector: torch.Tensor, codec: Codec = FLOAT32, chunk_bytes: int = 4096) -> Averages:
    """Return averages as a round would leave them, had its average been `vector`."""
    plan = plan_chunks(vector.numel(), [1.0, 2.0], codec, chunk_bytes)
    averages = Averages(plan, codec, ResultBuffer())
    for chunk in plan.chunks:
        scratch = torch.empty(codec.encoded_bytes(chunk.numel), dtype=torch.uint8)
        averages.keep(chunk, codec.encode(vector[chunk.start : chunk.stop], scratch))
    return averages


def whole(vector: FlatVector) -> torch.Tensor:
    return (
        torch.cat([piece for _, piece in vector.pieces(0, vector.numel)]) if vector.numel else torch.empty(0)
    )


def every_kind() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(3, 4),
        torch.randn(6, 4).t(),
        torch.randn(8, 8)[::2, 1::3],
        torch.randn(5, dtype=torch.float64),
        torch.randn(5, dtype=torch.float16),
        torch.randn(5, dtype=torch.bfloat16),
        torch.empty(0, 7),
        torch.tensor(2.5),
        torch.tensor(1.5).expand(1, 1),
        torch.nn.Parameter(torch.randn(4)),
    ]


@pytest.mark.parametrize("read_in_place", [True, False])
def test_tensors_of_every_float_type_stride_and_shape_are_staged_and_restored(read_in_place: bool) -> None:
    tensors = every_kind()
    before = [tensor.detach().clone() for tensor in tensors]
    staging = Staging(tensors)
    vector = whole(staging.take(read_in_place=read_in_place))
    assert torch.equal(vector, torch.cat([tensor.float().reshape(-1) for tensor in before]))
    staging.put(averages_of(vector * 2))
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach(), (was.float() * 2).to(was.dtype))


@pytest.mark.parametrize("codec", ["float32", "float16"])
def test_unchanging_tensors_are_read_in_place_and_written_without_a_buffer(codec: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator) for shape in [(7,), (40, 50), (), (0,), (3000,), (1,)]]
    staging = Staging(tensors)
    vector = staging.take(read_in_place=True)
    assert vector.numel == staging.layout.numel
    assert {piece.data_ptr() for _, piece in vector.pieces(0, vector.numel)} == {
        t.data_ptr() for t in tensors if t.numel()
    }
    average = torch.randn(vector.numel, generator=generator)
    found = averages_of(average, find(codec))
    staging.put(found)
    expected = average.to(getattr(torch, codec)).float()
    assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in tensors]), expected)
    assert torch.equal(found.decoded(), expected)
    for start, stop in [(0, 7), (3, 9), (0, vector.numel), (2007, 2008), (2006, 2009), (5008, 5008)]:
        assert torch.equal(vector.read(start, stop), expected[start:stop])
    assert vector.element(2007) == tensors[2].item()


@pytest.mark.parametrize("codec", ["float32", "float16", "int8"])
def test_single_element_with_a_stride_of_zero_is_sent_as_any_other(codec: str) -> None:
    tensor = torch.tensor(1.5).expand(1, 1)
    assert tensor.stride() == (0, 0)
    [(_, values)] = Staging([tensor]).take(read_in_place=True).pieces(0, 1)
    scratch = torch.empty(find(codec).encoded_bytes(1), dtype=torch.uint8)
    find(codec).encode(values, scratch)
    assert values.data_ptr() == tensor.data_ptr()


def test_a_copy_does_not_follow_the_tensors_and_a_view_does() -> None:
    tensor = torch.zeros(3)
    staging = Staging([tensor])
    copied, read_in_place = staging.take(read_in_place=False), staging.take(read_in_place=True)
    tensor += 1.0
    assert whole(copied).tolist() == [0.0] * 3
    assert whole(read_in_place).tolist() == [1.0] * 3
    assert staging.nothing().numel == 3
    assert Staging([]).nothing().numel == 0


def test_a_difference_is_added_to_the_current_tensors() -> None:
    tensor, other = torch.tensor([1.0, 2.0]), torch.tensor([5.0], dtype=torch.float64)
    staging = Staging([tensor, other])
    staging.take(read_in_place=False)
    tensor += 10.0  # training continued
    other += 1.0
    staging.add_difference(averages_of(torch.tensor([3.0, 3.0, 6.0])))
    assert torch.equal(tensor, torch.tensor([13.0, 13.0]))
    assert other.item() == 7.0


class NoMemoryAt(TorchDispatchMode):
    """A context in which the operation of torch that makes the nth tensor of this thread has no memory for
    it.
    """

    def __init__(self, nth: int) -> None:
        super().__init__()
        self.remaining = nth

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with Allocations() as made:
            found = func(*args, **(kwargs or {}))
        self.remaining -= len(made.sizes)
        if made.sizes and self.remaining < 0:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_difference_is_added_to_all_tensors_or_to_none_wherever_memory_runs_out(dtype: torch.dtype) -> None:
    codec, failures = find("float16"), 0
    for nth in range(1000):
        tensors = [torch.zeros(300, dtype=dtype), torch.zeros(9), torch.zeros(20, 30, dtype=dtype).t()]
        staging = Staging(tensors)
        staging.take(read_in_place=False)
        averages = averages_of(torch.ones(909), codec, 1024)
        try:
            with NoMemoryAt(nth):
                staging.add_difference(averages)
        except torch.cuda.OutOfMemoryError:
            failures += 1
            assert not averages.written
            assert all(not bool(tensor.any()) for tensor in tensors)
            continue
        assert all(bool((tensor == 1.0).all()) for tensor in tensors)
        break
    assert failures >= 2


def test_the_buffer_is_made_once() -> None:
    staging = Staging([torch.zeros(4)])
    one, other = (staging.take(read_in_place=False).read(0, 4).data_ptr() for _ in range(2))
    assert one == other


def test_only_copied_tensors_take_memory() -> None:
    """A few tensors of another type among many that are read where they are."""
    tensors = [
        torch.zeros(1_000_000),
        torch.ones(4, dtype=torch.bfloat16),
        torch.zeros(10),
        torch.ones(3, 2).t(),
    ]
    staging = Staging(tensors)
    with Allocations() as allocated:
        vector = staging.take(read_in_place=True)
    assert sum(allocated.sizes) == 4 * 10
    assert vector.numel == 1_000_020
    with Allocations() as allocated:
        staging.take(read_in_place=False)
        staging.take(read_in_place=True)
        staging.take(read_in_place=False)
    # what continues changing is copied whole, into memory that is made once
    assert sum(allocated.sizes) == 4 * 1_000_020


@pytest.mark.parametrize("seed", range(4))
def test_rounds_with_and_without_copies_may_alternate(seed: int) -> None:
    """The copies lie elsewhere in each kind: a difference is still that of its own round."""
    chance = random.Random(seed)
    tensors, moved = every_kind(), 0.0
    staging = Staging(tensors)
    before = [tensor.detach().to(torch.float64, copy=True) for tensor in tensors]
    for _ in range(6):
        if chance.random() < 0.5:
            vector = whole(staging.take(read_in_place=True))
            staging.put(averages_of(vector + 1.0))
        else:
            vector = whole(staging.take(read_in_place=False)).clone()
            staging.add_difference(averages_of(vector + 1.0))
        moved += 1.0
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.allclose(
            tensor.detach().double(), was + moved, atol=0.1 if tensor.dtype == torch.bfloat16 else 0.01
        )


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([torch.zeros(3, dtype=torch.int64)], "tensor 0 is of torch.int64"),
        ([torch.zeros(3), torch.zeros(3, dtype=torch.complex64)], "tensor 1 is of torch.complex64"),
        ([torch.zeros(3, device="meta")], "meta device"),
        ([torch.zeros(1).expand(4)], "tensor 0 is expanded"),
        ([torch.zeros(3).to_sparse()], "only dense"),
        (["no tensor"], "tensor 0 is a str"),
    ],
)
def test_a_tensor_that_cannot_be_averaged_is_named(tensors: list[torch.Tensor], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Staging(tensors)


def test_memory_shared_between_tensors_is_refused_and_neighbours_are_not() -> None:
    whole = torch.zeros(6, 6)
    Staging([whole[:, :3], whole[:, 3:]])  # interleaved columns have no element in common
    Staging([whole.view(-1)[:10], whole.view(-1)[10:]])
    for tensors in (
        [whole, whole],
        [whole[:, :3], whole[:, 2:]],
        [whole[0], whole],
        [whole[:2], whole[5], whole.view(-1)[3:8]],
    ):
        with pytest.raises(UsageError, match="share memory"):
            Staging(tensors)


def test_a_tensor_that_changed_its_shape_is_named() -> None:
    tensor = torch.zeros(3)
    staging = Staging([tensor])
    tensor.resize_(4)
    with pytest.raises(UsageError, match="tensor 0"):
        staging.take(read_in_place=True)
    with pytest.raises(UsageError, match="tensor 0"):
        staging.put(averages_of(torch.zeros(3)))
