"""The plain codecs: sizes, error bounds, exactness of what travels, and the registry."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.compression import Codec, find, find_wire_id, names, register, view_bytes
from swarm.compression.plain import BFLOAT16, FLOAT16, FLOAT32, SERIAL_ELEMENTS_MAX, PlainCodec, cast
from swarm.core.errors import UsageError

PLAIN: list[PlainCodec] = [FLOAT32, FLOAT16, BFLOAT16]


def there_and_back(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    scratch = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    payload = bytes(codec.encode(values, scratch))
    assert len(payload) == codec.encoded_bytes(values.numel())
    return codec.decode(payload, torch.empty(values.numel()))


@pytest.mark.parametrize("codec", PLAIN, ids=lambda codec: codec.name)
@pytest.mark.parametrize("numel", [0, 1, 7, 1000, SERIAL_ELEMENTS_MAX, 3 * SERIAL_ELEMENTS_MAX + 5])
def test_sizes_and_errors_stay_within_the_declared_bounds(codec: PlainCodec, numel: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * 100
    decoded = there_and_back(codec, values)
    assert codec.encoded_bytes(numel) * 8 == numel * codec.bits_per_element
    if numel:
        assert float((decoded - values).abs().max()) <= codec.error_bound(float(values.abs().max()))
    # what was decoded travels without a further error
    assert torch.equal(there_and_back(codec, decoded), decoded)
    assert torch.equal(decoded, values.to(codec.dtype).float())


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50))
@settings(max_examples=100, deadline=None)
def test_error_bound_holds_for_any_values(raw: list[float]) -> None:
    values = torch.tensor(raw, dtype=torch.float32)
    for codec in PLAIN:
        kept = values.clamp(-codec.magnitude_max, codec.magnitude_max)
        if kept.numel():
            worst = float((there_and_back(codec, kept).double() - kept.double()).abs().max())
            assert worst <= codec.error_bound(float(kept.abs().max()))


@pytest.mark.parametrize("offset", [0, 1, 3, 16])
def test_decodes_from_any_place_in_a_message(offset: int) -> None:
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(1))
    for codec in PLAIN:
        payload = bytes(
            codec.encode(values, torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8))
        )
        message = memoryview(bytes(offset) + payload)[offset:]
        out = torch.empty(values.numel())
        assert torch.equal(codec.decode(message, out), values.to(codec.dtype).float())


def test_float32_is_not_copied() -> None:
    values = torch.randn(100)
    scratch = torch.empty(400, dtype=torch.uint8)
    view = FLOAT32.encode(values, scratch)
    values[0] = 3.0
    assert torch.frombuffer(bytearray(view), dtype=torch.float32)[0] == 3.0


@pytest.mark.parametrize("codec", PLAIN, ids=lambda codec: codec.name)
def test_is_finite_detects_nan_and_infinity_in_encoded_bytes(codec: PlainCodec) -> None:
    def encoded(values: torch.Tensor) -> bytes:
        return bytes(
            codec.encode(values, torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8))
        )

    tiny = 2.0**-149
    for fine in ([], [0.0, -0.0], [codec.magnitude_max, -codec.magnitude_max], [tiny, -tiny, 1.0], [-1.0]):
        payload = encoded(torch.tensor(fine))
        assert codec.is_finite(payload)
        assert codec.is_finite(view_bytes(payload))
    rng = random.Random(codec.name)
    too_large = (
        [] if codec.dtype == torch.float32 else [1.003 * codec.magnitude_max, -1.003 * codec.magnitude_max]
    )
    for bad in (float("nan"), float("inf"), -float("inf"), -float("nan"), *too_large):
        values = torch.full(
            (70_000,), rng.choice([0.0, 1.0, -1.0, codec.magnitude_max, -codec.magnitude_max])
        )
        values[rng.randrange(values.numel())] = bad
        assert not codec.is_finite(encoded(values))


@given(st.binary(min_size=4, max_size=64))
@settings(max_examples=200, deadline=None)
def test_is_finite_agrees_with_decoding(raw: bytes) -> None:
    raw = raw[: len(raw) // 4 * 4]
    for codec in PLAIN:
        decoded = codec.decode(raw, torch.empty(len(raw) // codec.dtype.itemsize))
        assert codec.is_finite(raw) == bool(torch.isfinite(decoded).all())


def test_cast_matches_torch() -> None:
    values = torch.randn(2 * SERIAL_ELEMENTS_MAX + 1)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        target = torch.empty(values.numel(), dtype=dtype)
        cast(values, target)
        assert torch.equal(target, values.to(dtype))


def test_codecs_are_found_by_name_and_by_wire_id_and_version() -> None:
    assert {"float32", "float16", "bfloat16"} <= set(names())
    for codec in PLAIN:
        assert find(codec.name) is codec
        assert find_wire_id(codec.wire_id, codec.version) is codec
        assert find_wire_id(codec.wire_id, codec.version + 1) is None
        register(codec)
    with pytest.raises(UsageError, match="there is no codec 'gzip'; there are bfloat16"):
        find("gzip")
    with pytest.raises(UsageError, match="collides"):
        register(replace(FLOAT16, version=2))
    with pytest.raises(UsageError, match="collides"):
        register(replace(FLOAT16, name="half"))
    with pytest.raises(UsageError, match="wire id"):
        register(replace(FLOAT16, name="half", wire_id=0))
