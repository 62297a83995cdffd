"""Schemas: trees of tensors, packed, unpacked and compared."""

from __future__ import annotations

import msgpack
import pytest
import torch

from moe.protocol.schema import (
    LEAVES_MAX,
    ExpertSchema,
    Leaf,
    check,
    flatten,
    leaves,
    same_structure,
    unflatten,
)
from swarm.core.errors import PeerError, UsageError

NESTED = (
    torch.zeros(2, 3),
    {"b": [torch.zeros(2, dtype=torch.int64)], "a": (torch.zeros(2, 1, 4, dtype=torch.bfloat16),)},
)


def test_nested_values_are_flattened_and_rebuilt() -> None:
    tree, tensors = flatten(NESTED)
    assert [str(leaf) for leaf in leaves(tree)] == [
        "float32(batch, 3)",
        "bfloat16(batch, 1, 4)",
        "int64(batch)",
    ]
    again = unflatten(tree, tensors)
    assert again[0] is NESTED[0]
    assert isinstance(again[1]["b"], list)
    assert isinstance(again[1]["a"], tuple)
    assert same_structure(tree, flatten(again)[0])


def test_a_packed_schema_unpacks_to_the_same_schema() -> None:
    schema = ExpertSchema.from_samples(NESTED, {"y": torch.zeros(2, 5)})
    again = ExpertSchema.unpack(schema.packed)
    assert again == schema
    assert again.digest == schema.digest
    assert ExpertSchema.from_samples(NESTED, {"y": torch.zeros(2, 6)}).digest != schema.digest
    assert [leaf.is_floating for leaf in schema.input_leaves] == [True, True, False]
    assert len(schema.input_gradient_leaves) == 2


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb([["tuple", ["float32", [3]]], ["float33", [3]]]),
        msgpack.packb([["tuple", ["float32", [-1]]], ["float32", [3]]]),
        msgpack.packb([["tuple", ["float32", [True]]], ["float32", [3]]]),
        msgpack.packb([["float32", [3]], ["float32", [3]]]),  # inputs are arguments
        *(
            msgpack.packb([["tuple", ["float32", [4, 3], number]], ["float32", [3]]])
            for number in (2, -1, True, "0", [0])
        ),
        msgpack.packb([["tuple", ["float32", [4, 3], 0, 0]], ["float32", [3]]]),
        msgpack.packb([["tuple", ["float32", [0, 3], 0]], ["float32", [3]]]),
        msgpack.packb([["tuple", ["float32", [4, 3]]], ["float32", [4], 0]]),  # no input decides the length
        msgpack.packb([["tuple", ["float32", [4], 0]], ["float32", [5], 0]]),
        msgpack.packb([["tuple"], ["float32", [3]]]),
        msgpack.packb([["tuple", *[["float32", [3]]] * (LEAVES_MAX + 1)], ["float32", [3]]]),
        msgpack.packb([["tuple", ["float32", [1 << 20, 1 << 20]]], ["float32", [3]]]),
        msgpack.packb([["tuple", ["float32", [3]]], {"k" * 100: ["float32", [3]]}]),
        b"x" * 10_000,
    ],
)
def test_malformed_schemas_are_refused(packed: bytes) -> None:
    with pytest.raises((PeerError, UsageError)):
        ExpertSchema.unpack(packed)


def test_excessive_nesting_is_refused() -> None:
    packed: object = ["float32", [3]]
    for _ in range(40):
        packed = ["list", packed]
    with pytest.raises(PeerError):
        ExpertSchema.unpack(msgpack.packb([["tuple", packed], ["float32", [3]]]))


@pytest.mark.parametrize(
    "value",
    [
        3,
        "x",
        torch.tensor(1.0),
        [torch.zeros(1), None],
        {1: torch.zeros(1)},
        torch.zeros(1, dtype=torch.complex64),
    ],
)
def test_values_that_are_no_trees_of_tensors_are_refused(value: object) -> None:
    with pytest.raises(UsageError):
        flatten(value)


def test_an_error_names_the_tensor_that_does_not_fit() -> None:
    expected = (Leaf(torch.float32, (3,)), Leaf(torch.int64, ()))
    assert check(expected, [torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)], "input") == 4
    with pytest.raises(UsageError, match="input 0 should be float32"):
        check(expected, [torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)], "input")
    with pytest.raises(UsageError, match="input 1 should be int64"):
        check(expected, [torch.zeros(4, 3), torch.zeros(4)], "input")
    with pytest.raises(UsageError, match="same first dimension"):
        check(expected, [torch.zeros(4, 3), torch.zeros(5, dtype=torch.int64)], "input")
    with pytest.raises(UsageError, match="has 2 input tensors"):
        check(expected, [torch.zeros(4, 3)], "input")


def test_sequences_may_be_shorter_where_a_schema_of_shorter_samples_differs() -> None:
    def of(length: int) -> ExpertSchema:
        inputs = (torch.zeros(2, length, 3), {"mask": torch.zeros(2, length, dtype=torch.bool)})
        return ExpertSchema.from_samples(inputs, [torch.zeros(2, 3), torch.zeros(2, 4, length)])

    schema = of(8).with_shorter(of(4))
    assert str(schema) == (
        "(float32(batch, 1 to 8, 3), {mask: bool(batch, 1 to 8)}) -> "
        "[float32(batch, 3), float32(batch, 4, 1 to 8)]"
    )
    again = ExpertSchema.unpack(schema.packed)
    assert again == schema
    assert again.digest == schema.digest != of(8).digest
    assert (schema.sequence_length, of(8).sequence_length) == (8, 0)
    for length in range(1, 9):
        assert schema.at(length) == of(length)
        assert schema.length_of([torch.zeros(5, length, 3), torch.zeros(5, length)]) == length
    for length in (0, 9):
        with pytest.raises(UsageError, match="sequences of 1 to 8"):
            schema.at(length)
    assert of(8).at(0) == of(8)
    with pytest.raises(UsageError, match="one length"):
        of(8).at(8)


def test_schemas_of_many_lengths_are_kept_within_a_bound() -> None:
    schema = ExpertSchema.from_samples((torch.zeros(1, 2000),), torch.zeros(1, 2000)).with_shorter(
        ExpertSchema.from_samples((torch.zeros(1, 1000),), torch.zeros(1, 1000))
    )
    first = schema.at(1)
    assert schema.at(1) is first
    for length in range(1, 2001):
        assert schema.at(length).input_leaves[0].shape == (length,)
    assert schema.at(1) is not first, "it was dropped for later ones"


@pytest.mark.parametrize(
    "other", [torch.zeros(1, 2, 2), torch.zeros(1, 4), torch.zeros(1, 2, 4, dtype=torch.float64)]
)
def test_a_schema_that_differs_in_more_than_a_length_is_refused(other: torch.Tensor) -> None:
    schema = ExpertSchema.from_samples((torch.zeros(1, 4, 4),), torch.zeros(1, 4, 4))
    with pytest.raises(UsageError, match="only one dimension may be shorter"):
        schema.with_shorter(ExpertSchema.from_samples((other,), other))
