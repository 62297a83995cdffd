"""Tensors as bytes: exact without a codec, bounded errors with one, and malformed payloads are refused."""

from __future__ import annotations

import math

import pytest
import torch

from moe.protocol.schema import Leaf
from moe.protocol.tensors import (
    ABSENT,
    CHUNK_BYTES,
    Header,
    check_headers,
    check_payload,
    chunks,
    decode,
    encode,
    encode_on_device,
    expected_bytes,
    finite_flags,
    is_finite,
    join_payloads,
    payload_bytes,
)
from swarm.compression import find
from swarm.core.errors import PeerError

LEAVES = [
    Leaf(dtype, (3, 5))
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.uint8,
        torch.bool,
    )
]


def sample(leaf: Leaf, batch: int) -> torch.Tensor:
    values = torch.randn(batch, *leaf.shape, generator=torch.Generator().manual_seed(1)) * 3
    return values > 0 if leaf.dtype == torch.bool else values.abs().to(leaf.dtype)


def headers_of(payloads: list) -> list[Header]:  # type: ignore[type-arg]
    return [Header(one.codec, one.version, one.size_bytes, one.absent) for one in payloads]


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_every_dtype_is_decoded_exactly(batch: int) -> None:
    given = [sample(leaf, batch) for leaf in LEAVES]
    payloads = encode(given, None)
    payload = join_payloads(payloads)
    assert len(payload) == payload_bytes(payloads) == expected_bytes(LEAVES, batch, None)
    assert check_headers(headers_of(payloads), LEAVES, batch, absent_from=len(LEAVES)) == len(payload)
    found = decode(headers_of(payloads), LEAVES, batch, payload)
    assert all(
        one is not None and torch.equal(one, other) and one.dtype == other.dtype
        for one, other in zip(found, given, strict=True)
    )
    assert b"".join(chunks(payloads)) == payload


def test_large_uncompressed_tensors_are_views_of_the_payload() -> None:
    payload = join_payloads(encode([torch.randn(1 << 10, 16)], None))
    headers, leaves = [Header(0, 0, 1 << 16)], [Leaf(torch.float32, (16,))]
    found, again = (decode(headers, leaves, 1 << 10, payload)[0] for _ in range(2))
    assert found is not None
    assert again is not None
    assert found.data_ptr() == again.data_ptr()


@pytest.mark.parametrize("numel", [1, 100, 1 << 16, (1 << 17) + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_tensor_is_finite_unless_an_element_is_not(numel: int, dtype: torch.dtype) -> None:
    largest = torch.full((numel,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(largest)  # although the sum is not
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, numel // 2, numel - 1):
            wrong = largest.clone()
            wrong[place] = bad
            assert not is_finite(wrong)
    both = torch.zeros(2, dtype=dtype)
    both[0], both[1] = math.inf, -math.inf
    assert not is_finite(both)


def test_large_payloads_are_split_into_chunks() -> None:
    payloads = encode(
        [torch.randn(1, CHUNK_BYTES // 4 + 1), torch.ones(1, 3), torch.randn(1, CHUNK_BYTES // 2)], None
    )
    cut = list(chunks(payloads))
    assert all(0 < len(one) <= CHUNK_BYTES for one in cut)
    assert b"".join(cut) == join_payloads(payloads)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codecs_keep_their_error_bound(name: str, dtype: torch.dtype) -> None:
    codec, leaf = find(name), Leaf(dtype, (100,))
    given = torch.randn(3, 100).to(dtype)
    payloads = encode([given], codec)
    assert payload_bytes(payloads) == expected_bytes([leaf], 3, codec)
    found = decode(headers_of(payloads), [leaf], 3, join_payloads(payloads))[0]
    assert found is not None
    assert found.dtype == dtype
    bound = codec.error_bound(float(given.float().abs().max())) + (0.02 if dtype == torch.bfloat16 else 0.0)
    assert float((found.float() - given.float()).abs().max()) <= bound


def test_an_absent_gradient_takes_no_bytes() -> None:
    leaf = Leaf(torch.float32, (2,))
    payloads = encode([None, torch.ones(1, 2)], None)
    assert payloads[0] is ABSENT
    assert check_headers(headers_of(payloads), [leaf, leaf], 1, absent_from=0) == 16
    first, second = decode(headers_of(payloads), [leaf, leaf], 1, join_payloads(payloads))
    assert first is None
    assert second is not None
    with pytest.raises(PeerError, match="tensor 0 is missing"):
        check_headers(headers_of(payloads), [leaf, leaf], 1, absent_from=1)


def test_headers_that_do_not_fit_are_refused() -> None:
    floating, whole = Leaf(torch.float32, (2,)), Leaf(torch.int64, (2,))
    for headers, expected, said in (
        ([], [floating], "1 tensors are expected"),
        ([Header(0, 0, 12)], [floating], "has 8 bytes, not 12"),
        ([Header(999, 1, 8)], [floating], "codec 999"),
        ([Header(2, 77, 4)], [floating], "version 77"),
        ([Header(2, 1, 4)], [whole], "only floating"),
    ):
        with pytest.raises(PeerError, match=said):
            check_headers(headers, expected, 1, absent_from=9)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_nan_and_infinity_are_refused_with_their_place(value: float, dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 4, dtype=dtype)
    tensor[1, 2] = value
    with pytest.raises(PeerError, match=r"element 6 \(sample 1\)"):
        decode([Header(0, 0, tensor.nbytes)], [Leaf(dtype, (4,))], 3, join_payloads(encode([tensor], None)))


def test_broken_payloads_are_refused() -> None:
    leaf = Leaf(torch.float32, (4,))
    header = [Header(0, 0, 16)]
    with pytest.raises(PeerError, match="ends within"):
        decode(header, [leaf], 1, bytes(8))
    with pytest.raises(PeerError, match="has 32 bytes, not 16"):
        decode(header, [leaf], 1, bytes(32))
    with pytest.raises(PeerError, match="a bool is 0 or 1"):
        decode(header, [Leaf(torch.bool, (16,))], 1, bytes([2] * 16))
    with pytest.raises(PeerError, match="block 0"):
        decode([Header(find("int8").wire_id, 1, find("int8").encoded_bytes(4))], [leaf], 1, b"\xff" * 64)


@pytest.mark.parametrize("name", ["", "float32", "float16", "bfloat16", "int8", "int4", "sign"])
@pytest.mark.parametrize("leaf", LEAVES, ids=str)
def test_encoding_on_the_device_gives_the_bytes_of_the_host(name: str, leaf: Leaf) -> None:
    given = sample(leaf, 3)
    codec = find(name) if name else None
    (piece,) = encode([given.clone()], codec)
    header, raw = encode_on_device(given, codec)
    assert header == Header(piece.codec, piece.version, piece.size_bytes)
    assert raw.numpy().tobytes() == bytes(piece.payload)
    (checked,) = check_payload([header], [leaf], 3, join_payloads([piece]))
    (expected,) = decode([header], [leaf], 3, join_payloads([piece]))
    assert checked is not None
    assert expected is not None
    assert torch.equal(checked.decode(raw), expected)


def test_finite_flags_take_one_call_for_each_dtype() -> None:
    tensors: list[torch.Tensor | None] = [torch.tensor([1, 2]), None, torch.empty(0, 3)]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        tensors.append(torch.full((3, 2), torch.finfo(dtype).max, dtype=dtype))
        for value in (float("nan"), float("inf"), -float("inf")):
            tensor = torch.zeros(2, 5, dtype=dtype)
            tensor[1, 3] = value
            tensors.append(tensor)
    numbers, flags = finite_flags(tensors)
    assert sorted(numbers) == [
        number
        for number, one in enumerate(tensors)
        if one is not None and one.is_floating_point() and one.numel()
    ]
    for number, flag in zip(numbers, flags.tolist(), strict=True):
        tensor_found = tensors[number]
        assert tensor_found is not None
        assert bool(flag) == bool(torch.isfinite(tensor_found).all())
    assert finite_flags([torch.tensor([1]), None])[0] == []


def test_torchs_default_dtype_does_not_change_decoding() -> None:
    codec, leaf = find("int8"), Leaf(torch.float32, (100,))
    payloads = encode([torch.randn(3, 100, generator=torch.Generator().manual_seed(0))], codec)
    (expected,) = decode(headers_of(payloads), [leaf], 3, join_payloads(payloads))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        (found,) = decode(headers_of(payloads), [leaf], 3, join_payloads(payloads))
    finally:
        torch.set_default_dtype(before)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_of_one_element_with_stride_0_is_encoded(dtype: torch.dtype) -> None:
    """Regression: the gradient of a sum over one element is such a tensor."""
    one = torch.ones((), dtype=dtype).expand(1, 1)
    assert one.stride() == (0, 0)
    wanted = bytes.fromhex("0000803f" if dtype == torch.float32 else "803f")
    assert is_finite(one)
    assert join_payloads(encode([one], None))[: dtype.itemsize] == wanted
    assert bytes(encode_on_device(one, None)[1].numpy()) == wanted
