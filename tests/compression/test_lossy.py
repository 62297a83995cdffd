"""The codecs of a few bits: bytes compared with a slow reference implementation, error bounds, and hostile
payloads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

from swarm.compression import find
from swarm.compression.segments import SEGMENT_ELEMENTS
from swarm.testing.codec_contract import decoded, encoded

Floats = npt.NDArray[np.float32]
NAMES = ("int8", "int4", "int2", "sign", "topk")
BITS = {
    "int8": 8 + 32 / 4096,
    "int4": 4 + 32 / 128,
    "int2": 2 + 32 / 128,
    "sign": 1 + 32 / 4096,
    "topk": 16 / 64 + 32 / 4096,
}


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def heavy(numel: int, seed: int = 0) -> torch.Tensor:
    """Student's t with 3 degrees of freedom: gradients look more like this."""
    chance = torch.Generator().manual_seed(seed)
    normals = torch.randn(4, numel, generator=chance)
    return normals[0] / (normals[1:].square().sum(0) / 3).sqrt()


def relative_error(name: str, values: torch.Tensor) -> float:
    return float(
        (decoded(find(name), encoded(find(name), values), values.numel()) - values).norm() / values.norm()
    )


# ---- the format, said slowly


def planes(codes: npt.NDArray[np.int64], per_byte: int, zero: int) -> bytes:
    """`zero`: the code of 0.0, which fills up the last byte."""
    width, bits = -(-len(codes) // per_byte), 8 // per_byte
    codes = np.concatenate([codes, np.full(-len(codes) % per_byte, zero)])
    out = bytearray(width)
    for place, code in enumerate(codes):
        out[place % width] |= int(code) << bits * (place // width)
    return bytes(out)


def rounded(levels: int, block: int) -> Callable[[Floats], bytes]:
    def slow(values: Floats) -> bytes:
        scales, codes = [], []
        for start in range(0, len(values), block):
            piece = values[start : start + block]
            step = np.max(np.abs(piece)) * np.float32(1 / levels)
            step = step if step > 2.0**-98 else np.float32(0)
            scales.append(step)
            with np.errstate(divide="ignore"):
                inverse = min(np.float32(1) / step, np.float32(2.0**98))
            codes.append(np.rint(piece * inverse).astype(np.int64))
        whole = np.concatenate(codes)
        return np.array(scales, "<f4").tobytes() + (
            whole.astype(np.int8).tobytes() if levels == 127 else planes(whole + 8, 2, 8)
        )

    return slow


def ternary(values: Floats) -> bytes:
    scales, codes = [], []
    for start in range(0, len(values), 128):
        piece = values[start : start + 128]
        grain = np.max(np.abs(piece)) * np.float32(2.0**-16)
        counted = np.rint(np.abs(piece) * (np.float32(1) / grain))
        mean = np.float32(counted.sum(dtype=np.float64)) * np.float32(1 / len(piece))
        digits = np.clip(np.rint(piece * (np.float32(1) / (mean * np.float32(1.5) * grain))), -1, 1)
        kept = digits != 0
        scales.append(np.float32(counted[kept].sum(dtype=np.float64)) / np.float32(kept.sum()) * grain)
        codes.append(digits.astype(np.int64))
    return np.array(scales, "<f4").tobytes() + planes(np.concatenate(codes) + 1, 4, 1)


def signs(values: Floats) -> bytes:
    scales = []
    for start in range(0, len(values), 4096):
        piece = values[start : start + 4096]
        grain = np.max(np.abs(piece)) * np.float32(2.0**-17)
        counted = np.rint(np.abs(piece) * (np.float32(1) / grain))
        scales.append(np.float32(counted.sum(dtype=np.float64)) * np.float32(1 / len(piece)) * grain)
    return np.array(scales, "<f4").tobytes() + planes((values < 0).astype(np.int64), 8, 0)


def largest(values: Floats) -> bytes:
    scales, words = [], []
    for start in range(0, len(values), 4096):
        piece = values[start : start + 4096]
        coarse = np.abs(piece).view(np.int32) >> 12
        order = sorted(range(len(piece)), key=lambda place: (-int(coarse[place]), place))
        kept = sorted(order[: -(-len(piece) // 64)])
        step = np.max(np.abs(piece[kept])) * np.float32(1 / 7)
        scales.append(step)
        digits = np.rint(piece[kept] * (np.float32(1) / step)).astype(np.int64)
        words += [place | int(digit + 8) << 12 for place, digit in zip(kept, digits, strict=True)]
    return np.array(scales, "<f4").tobytes() + np.array(words, "<u2").tobytes()


SLOW = {"int8": rounded(127, 4096), "int4": rounded(7, 128), "int2": ternary, "sign": signs, "topk": largest}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "numel", [1, 2, 5, 64, 65, 127, 128, 1000, 4096, 4100, SEGMENT_ELEMENTS, 2 * SEGMENT_ELEMENTS + 4099]
)
def test_bytes_match_the_format(name: str, numel: int) -> None:
    for values in (
        normal(numel, numel),
        heavy(numel, numel),
        normal(numel, numel).round(),
        torch.full((numel,), -0.3),
    ):
        values[0] = 1.0
        expected = b"".join(
            SLOW[name](values[at : at + SEGMENT_ELEMENTS].numpy()) for at in range(0, numel, SEGMENT_ELEMENTS)
        )
        if name == "topk" and numel % 4096:
            values = values + 0.0  # its slow form knows no padding
        assert encoded(find(name), values) == expected


# ---- what is stated


@pytest.mark.parametrize("name", NAMES)
def test_bits_per_element_are_as_documented(name: str) -> None:
    assert find(name).bits_per_element == BITS[name]
    assert find(name).encoded_bytes(1) <= 6  # a scale and a code


def test_rounds_to_nearest_and_ties_to_even() -> None:
    values = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, -3.5, 3.4999])
    assert decoded(find("int4"), encoded(find("int4"), values), 8).tolist() == pytest.approx(
        [7, 0, 2, 2, 0, -2, -4, 3], rel=1e-6
    )


@pytest.mark.parametrize(
    ("name", "on_normal", "on_heavy"),
    [
        ("int8", 0.0095, 0.06),
        ("int4", 0.12, 0.26),
        ("int2", 0.45, 0.70),
        ("sign", 0.61, 0.80),
        ("topk", 0.945, 0.82),
    ],
)
def test_the_relative_error_is_below_the_documented_figure(
    name: str, on_normal: float, on_heavy: float
) -> None:
    assert relative_error(name, normal(1 << 18)) < on_normal
    assert relative_error(name, heavy(1 << 18)) < on_heavy


@pytest.mark.parametrize("name", ["int2", "sign", "topk", "int4", "int8"])
def test_the_error_is_not_longer_than_the_input(name: str) -> None:
    """Error feedback needs this, because residuals must not grow by themselves."""
    cauchy = normal(50_001, 5) / normal(50_001, 6)
    for values in (
        normal(50_001),
        heavy(50_001),
        cauchy,
        torch.full((300,), 0.1),
        torch.eye(100).flatten(),
        normal(3),
        normal(1),
    ):
        result = decoded(find(name), encoded(find(name), values), values.numel())
        assert float((result - values).double().norm()) <= float(values.double().norm()) * (1 + 1e-4)


def test_top_k_keeps_the_largest_and_of_equals_the_first() -> None:
    values = torch.zeros(8192)
    values[100:300] = -2.0
    values[4096 + 4000] = 5.0
    values[200] = 3.0
    result = decoded(find("topk"), encoded(find("topk"), values), 8192)
    assert result.nonzero().flatten().tolist() == [*range(100, 163), 200, 4096 + 4000]
    assert result[4096 + 4000] == pytest.approx(5.0)


@pytest.mark.parametrize("name", NAMES)
def test_decodes_into_the_callers_memory(name: str) -> None:
    values = normal(40_000)
    place = torch.empty(40_000)
    assert find(name).decode(encoded(find(name), values), place) is place
    scratch = torch.empty(find(name).encoded_bytes(40_000), dtype=torch.uint8)
    view = find(name).encode(values, scratch)
    assert np.frombuffer(view, np.uint8).__array_interface__["data"][0] == scratch.data_ptr()
    odd = torch.empty(1 + find(name).encoded_bytes(40_000), dtype=torch.uint8)[1:]
    assert bytes(find(name).encode(values, odd)) == bytes(view)
    odd.copy_(torch.frombuffer(bytearray(view), dtype=torch.uint8))
    assert torch.equal(find(name).decode(odd, torch.empty(40_000)), place)


def test_subnormal_blocks_become_zeros() -> None:
    for name in NAMES:
        for magnitude in (1e-45, 1e-40, 2.0**-126, 2.0**-101):
            assert not decoded(
                find(name), encoded(find(name), normal(300).clamp(-1, 1) * magnitude), 300
            ).any()


# ---- payloads from a stranger


def test_each_flaw_of_a_payload_is_described() -> None:
    def wrong(name: str, numel: int, at: int, put: bytes) -> str:
        payload = bytearray(encoded(find(name), normal(numel)))
        payload[at : at + len(put)] = put
        assert not find(name).is_finite(payload)
        return find(name).flaw(payload, numel)

    nan, huge = np.array([math.nan, 1e38], "<f4").tobytes()[:4], np.array([1e38], "<f4").tobytes()
    assert find("int4").flaw(bytes(10), 1000) == "1000 elements in int4 are 532 bytes, not 10"
    assert wrong("int4", 1000, 8, nan) == "the scale of block 2 of segment 0 is nan"
    assert (
        wrong("int8", 3 * SEGMENT_ELEMENTS, SEGMENT_ELEMENTS + 16, huge)
        == "the scale of block 0 of segment 1 is 1e+38"
    )
    assert (
        wrong("sign", 10, 0, np.array([-math.inf], "<f4").tobytes())
        == "the scale of block 0 of segment 0 is -inf"
    )
    first = encoded(find("topk"), normal(4096))
    assert "repeated in a chunk" in wrong("topk", 4096, 6, first[4:6])
    assert "out of order in a chunk" in wrong("topk", 4096, 4, b"\xff\xff")
    for size in (1, 4, 5, 7):
        assert not find("topk").is_finite(bytes(size))
    assert not find("int4").is_finite(bytes(4))


def test_a_sparse_index_beyond_the_end_is_a_flaw_and_touches_no_memory() -> None:
    payload = bytearray(encoded(find("topk"), torch.tensor([1.0, 2.0, 3.0])))
    payload[4:6] = (3 | 15 << 12).to_bytes(2, "little")
    assert find("topk").flaw(payload, 3) == "place 3 in a chunk of 3 elements"
    # and no memory beyond is touched
    assert decoded(find("topk"), bytes(payload), 3).tolist() == [0.0, 0.0, 0.0]
    assert not find("topk").flaw(payload, 4)


def test_repeated_places_give_nan_in_an_average() -> None:
    """Reducers decode first and look at the sum: what is no encoding must not average into
    something finite.
    """
    payload = bytearray(encoded(find("topk"), normal(8192)))
    payload[8 + 128 :] = bytes(128)  # the second chunk: 64 times place 0
    result = decoded(find("topk"), bytes(payload), 8192)
    assert result[:4096].isfinite().all()
    assert result[4096:].isnan().any()


# ---- other devices


def devices() -> list[str]:
    return ["cuda"] if torch.cuda.is_available() else []


@pytest.mark.skipif(not devices(), reason="no CUDA device: GPU and CPU cannot be compared bit by bit")
@pytest.mark.parametrize("name", [*NAMES, "float16", "bfloat16", "float32"])
def test_a_gpu_makes_the_same_bits(name: str) -> None:
    codec = find(name)
    sizes = (0, 1, 1000, SEGMENT_ELEMENTS, 300 * SEGMENT_ELEMENTS + 4099)
    kinds = (
        normal,
        heavy,
        lambda n: normal(n).round(),
        lambda n: normal(n) * 1e-30,
        lambda n: normal(n) * 1e-42,
    )
    for values in (kind(numel) for numel in sizes for kind in kinds):
        numel = values.numel()
        payload = encoded(codec, values)
        scratch = torch.empty(codec.encoded_bytes(numel), dtype=torch.uint8)
        assert bytes(codec.encode(values.cuda(), scratch)) == payload
        there = codec.decode(payload, torch.empty(numel, device="cuda"))
        assert there.device.type == "cuda"
        assert torch.equal(there.cpu(), decoded(codec, payload, numel))
