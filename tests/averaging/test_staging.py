"""The one pass between a user's tensors and the flat vector, and what cannot be staged."""

from __future__ import annotations

import pytest
import torch

from averaging.staging import Staging
from swarm.errors import UsageError


def test_every_float_type_stride_and_shape_goes_in_and_comes_back() -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(3, 4),
        torch.randn(6, 4).t(),
        torch.randn(8, 8)[::2, 1::3],
        torch.randn(5, dtype=torch.float64),
        torch.randn(5, dtype=torch.float16),
        torch.randn(5, dtype=torch.bfloat16),
        torch.empty(0, 7),
        torch.tensor(2.5),
        torch.nn.Parameter(torch.randn(4)),
    ]
    before = [tensor.detach().clone() for tensor in tensors]
    staging = Staging(tensors)
    staging.take()
    assert torch.equal(staging.vector, torch.cat([tensor.float().reshape(-1) for tensor in before]))
    staging.put(staging.vector * 2)
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor.detach(), (was.float() * 2).to(was.dtype))


def test_a_difference_is_added_to_what_the_tensors_have_become() -> None:
    tensor = torch.tensor([1.0, 2.0])
    staging = Staging([tensor])
    staging.take()
    tensor += 10.0  # training went on
    staging.add_difference(torch.tensor([3.0, 3.0]))
    assert torch.equal(tensor, torch.tensor([13.0, 13.0]))


def test_buffers_are_made_once() -> None:
    staging = Staging([torch.zeros(4)])
    vector, average = staging.vector.data_ptr(), staging.average.data_ptr()
    staging.take()
    staging.put(staging.average)
    assert (staging.vector.data_ptr(), staging.average.data_ptr()) == (vector, average)


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
def test_what_cannot_be_averaged_is_named(tensors: list[torch.Tensor], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Staging(tensors)


def test_memory_shared_between_tensors_is_refused_and_neighbours_are_not() -> None:
    whole = torch.zeros(6, 6)
    Staging([whole[:, :3], whole[:, 3:]])  # interleaved columns have no element in common
    Staging([whole.view(-1)[:10], whole.view(-1)[10:]])
    for tensors in ([whole, whole], [whole[:, :3], whole[:, 2:]], [whole[0], whole], [whole[:2], whole[5], whole.view(-1)[3:8]]):
        with pytest.raises(UsageError, match="share memory"):
            Staging(tensors)


def test_a_tensor_that_changed_its_shape_is_named() -> None:
    tensor = torch.zeros(3)
    staging = Staging([tensor])
    tensor.resize_(4)
    with pytest.raises(UsageError, match="tensor 0"):
        staging.take()
