"""Contract of codecs: call `check_codec` from a test of your own codec, as this project does for its codecs.

An AssertionError says which property does not hold, and for which input.
"""

from __future__ import annotations

import math

import torch

from swarm.compression import Codec, view_bytes

_SIZES = (0, 1, 2, 3, 7, 8, 63, 127, 129, 1000, 4095, 4097, 10_001)


def check_codec(codec: Codec) -> None:
    """Check sizes, the error bound, determinism, cuts at block borders, NaN and infinity, and payloads from a
    hostile peer. Raise AssertionError when a property does not hold.
    """
    chance = torch.Generator().manual_seed(0)
    block = codec.block_elements
    assert block % 32768 == 0 or block >= 1 << 20, (
        f"{codec.name}: sums over a shard are reproducible only if blocks are multiples of 32768"
    )
    for numel in (*_SIZES, block - 1, block, block + 77):
        for values in inputs(numel, chance)[: None if numel < block - 1 else 2]:
            _check_values(codec, values)
        _check_hostile(codec, numel, chance)
    _check_cuts(codec, torch.randn(2 * block + 77, generator=chance))
    _check_bits(codec)
    for numel in (1, 100, 5000):
        _check_refused(codec, torch.randn(numel, generator=chance), numel // 2)


def encoded(codec: Codec, values: torch.Tensor) -> bytes:
    """Return the encoding of flat float32 values."""
    scratch = torch.full((codec.encoded_bytes(values.numel()),), 0xA5, dtype=torch.uint8)
    return bytes(codec.encode(values, scratch))


def decoded(codec: Codec, payload: bytes | memoryview, numel: int) -> torch.Tensor:
    """Return the values of an encoding, in their own memory."""
    return codec.decode(payload, torch.full((numel,), float("nan"))).clone()


def inputs(numel: int, chance: torch.Generator) -> list[torch.Tensor]:
    """Return vectors of `numel` finite values: normal, heavy-tailed, large, tiny, equal, zero."""
    normal = torch.randn(numel, generator=chance)
    zeros = torch.zeros(numel)
    spike = zeros.clone()
    spike[numel // 2 :][:1] = -3.0
    return [
        normal,
        normal**5,
        normal * 1e4,
        normal * 1e-30,
        normal * 1e-42,
        torch.full((numel,), 0.1),
        zeros,
        -zeros,
        spike,
    ]


def _check_values(codec: Codec, values: torch.Tensor) -> None:
    about = f"{codec.name}, {values.numel()} elements"
    values = values.clamp(-codec.magnitude_max, codec.magnitude_max)
    before = values.clone()
    payload = encoded(codec, values)
    assert torch.equal(before, values), f"{about}: encoding changed the values"
    assert len(payload) == codec.encoded_bytes(values.numel()), f"{about}: {len(payload)} bytes"
    assert payload == encoded(codec, values.clone()), f"{about}: the same values, other bytes"
    written = torch.full((len(payload),), 0xA5, dtype=torch.uint8)
    codec.write(values, written)
    assert written.numpy().tobytes() == payload, f"{about}: `write` and `encode` make different bytes"
    assert codec.is_finite(payload), f"{about}: finite values, and the encoding is not"
    assert not (found := codec.flaw(payload, values.numel())), f"{about}: {found}"
    result = decoded(codec, payload, values.numel())
    for offset in (1, 2, 5):  # at any offset in a message
        message = memoryview(bytes(offset) + payload)[offset:]
        assert torch.equal(decoded(codec, message, values.numel()), result), (
            f"{about}: other values at offset {offset}"
        )
    if values.numel():
        magnitude = float(values.abs().max())
        error = float((result.double() - values.double()).abs().max())
        assert error <= codec.error_bound(magnitude), (
            f"{about}: an error of {error:g} with magnitudes up to {magnitude:g}"
        )


def _check_cuts(codec: Codec, values: torch.Tensor) -> None:
    block, payload = codec.block_elements, encoded(codec, values)
    pieces = []
    for start in range(0, values.numel(), block):
        piece = values[start : start + block]
        pieces.append(encoded(codec, piece))
        cut = payload[codec.encoded_bytes(start) : codec.encoded_bytes(start + piece.numel())]
        assert cut == pieces[-1], (
            f"{codec.name}: elements from {start} on have a different encoding when encoded alone"
        )
        assert torch.equal(
            decoded(codec, cut, piece.numel()), decoded(codec, payload, values.numel())[start : start + block]
        )
    assert b"".join(pieces) == payload


def _check_bits(codec: Codec) -> None:
    numel = 1 << 24
    assert math.isclose(8 * codec.encoded_bytes(numel) / numel, codec.bits_per_element, rel_tol=1e-6), (
        f"{codec.name}: bits_per_element"
    )
    sizes = [codec.encoded_bytes(numel) for numel in range(10_000)]
    assert sizes[0] == 0
    assert sizes == sorted(sizes), f"{codec.name}: more elements, fewer bytes"


def _check_refused(codec: Codec, values: torch.Tensor, place: int) -> None:
    """Check that NaN, infinity and values beyond the codec's range show in the encoding, so that the sender
    can be identified.
    """
    too_large = codec.magnitude_max * 1.01
    for bad in (
        math.nan,
        -math.nan,
        math.inf,
        -math.inf,
        *([too_large, -too_large] if too_large < 3.4e38 else []),
    ):
        spoiled = values.clone()
        spoiled[place] = bad
        payload = encoded(codec, spoiled)
        assert not codec.is_finite(payload), (
            f"{codec.name}: {bad} among {values.numel()} values, and the encoding is finite"
        )
        assert codec.flaw(payload, values.numel()), f"{codec.name}: nothing is wrong with {bad}"


def _check_hostile(codec: Codec, numel: int, chance: torch.Generator) -> None:
    """Check that arbitrary bytes never raise an exception, and never decode to NaN or infinity when they pass
    the checks.
    """
    size = codec.encoded_bytes(numel)
    for length in {0, 1, 2, 3, 5, max(size - 1, 0), size + 1, size + 4} - {size}:
        assert codec.flaw(bytes(length), numel), f"{codec.name}: {length} bytes for {numel} elements"
        codec.is_finite(bytes(length))
    for high in (256, 64):
        payload = torch.randint(0, high, (size,), generator=chance, dtype=torch.uint8).numpy().tobytes()
        finite = bool(torch.isfinite(decoded(codec, payload, numel)).all())
        assert finite or not codec.is_finite(payload), (
            f"{codec.name}: {numel} elements pass, and decode to NaN or infinity"
        )
        assert codec.is_finite(payload) == codec.is_finite(view_bytes(payload))
        assert codec.is_finite(payload) or codec.flaw(payload, numel), (
            f"{codec.name}: not finite, and nothing wrong"
        )
