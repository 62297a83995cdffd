"""Tensors in and out of the flat vector, and the hash by which layouts are compared."""

from __future__ import annotations

import pytest
import torch

from averaging.reduction.layout import TensorLayout, schema_hash
from swarm.compression import find
from swarm.core.errors import UsageError


def some_tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(3, 4, generator=generator),
        torch.empty(0, 7),
        torch.randn((), generator=generator),
        torch.randn(5, generator=generator, dtype=torch.float64),
        torch.randn(6, 2, generator=generator).to(torch.bfloat16).t(),
        torch.randn(2, generator=generator).requires_grad_(),
    ]


def test_tensors_follow_one_another_in_the_vector() -> None:
    tensors = some_tensors()
    layout = TensorLayout.of(tensors)
    assert layout.numel == 12 + 0 + 1 + 5 + 12 + 2
    assert layout.offsets == (0, 12, 12, 13, 18, 30)
    layout.check([torch.zeros_like(tensor) for tensor in tensors])


def test_an_empty_list_of_tensors_has_an_empty_layout() -> None:
    layout = TensorLayout.of([])
    assert layout.numel == 0


def test_finds_the_tensor_of_an_element() -> None:
    layout = TensorLayout.of(some_tensors())
    assert [layout.find_tensor(element) for element in (0, 11, 12, 13, 17, 18, 31)] == [0, 0, 2, 3, 3, 4, 5]
    with pytest.raises(UsageError, match="outside"):
        layout.find_tensor(32)


def test_tensors_that_cannot_be_averaged_are_refused() -> None:
    with pytest.raises(UsageError, match=r"tensor 1 is of torch\.int64"):
        TensorLayout.of([torch.zeros(2), torch.zeros(2, dtype=torch.int64)])
    with pytest.raises(UsageError, match="tensor 0 is torch"):
        TensorLayout.of([torch.zeros(2, 2).to_sparse()])
    layout = TensorLayout.of([torch.zeros(2)])
    with pytest.raises(UsageError, match="2 tensors where there were 1"):
        layout.check([torch.zeros(2), torch.zeros(2)])
    with pytest.raises(UsageError, match="tensor 0 is"):
        layout.check([torch.zeros(3)])


def test_the_schema_hash_follows_shapes_codec_and_settings() -> None:
    base = TensorLayout.of([torch.zeros(2, 3), torch.zeros(4)])
    codec = find("float32")
    same = schema_hash(TensorLayout.of([torch.ones(2, 3), torch.ones(4)]), codec)
    assert schema_hash(base, codec) == same
    assert len(same) == 32
    others = [
        schema_hash(base, find("float16")),
        schema_hash(TensorLayout.of([torch.zeros(3, 2), torch.zeros(4)]), codec),
        schema_hash(TensorLayout.of([torch.zeros(4), torch.zeros(2, 3)]), codec),
        schema_hash(TensorLayout.of([torch.zeros(2, 3), torch.zeros(4).half()]), codec),
        schema_hash(TensorLayout.of([torch.zeros(2, 3)]), codec),
    ]
    assert len({same, *others}) == 6
