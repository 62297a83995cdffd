"""Codecs on the GPU write and read the same bytes as on the host: for odd sizes, subnormal numbers, extremes
and arbitrary payloads.
"""

from __future__ import annotations

import zlib

import pytest
import torch

from averaging.reduction.lowrank import expand
from swarm.compression import find, names

SIZES = [0, 1, 2, 3, 7, 8, 9, 31, 255, 256, 257, 1023, 4095, 4096, 4097, 65_537]
LARGE = 3_000_017
KINDS = [
    "normal",
    "subnormal",
    "all magnitudes",
    "zeros of both signs",
    "one large value",
    "steps of codes",
    "not finite",
]


def values_of(kind: str, numel: int, largest: float) -> torch.Tensor:
    """Float32 on the host, from a seed that follows from the arguments; at most `largest` in magnitude."""
    chance = torch.Generator().manual_seed(zlib.crc32(f"{kind} {numel}".encode()))
    plain = torch.randn(numel, generator=chance)
    if kind == "subnormal":
        return plain * 2.0**-133
    if kind == "all magnitudes":
        exponents = torch.randint(-149, 127, (numel,), generator=chance).to(torch.float32)
        return (plain.sign() * torch.exp2(exponents)).clamp(-largest, largest)
    if kind == "zeros of both signs":
        return torch.zeros(numel) * plain.sign()
    if kind == "one large value" and numel:
        plain[numel // 2] = min(largest, 1e30)
    # values in the middle between two codes of the integer codecs, where rounding decides
    if kind == "steps of codes":
        return torch.randint(-254, 255, (numel,), generator=chance).to(torch.float32) / 254.0
    if kind == "not finite" and numel:
        plain[numel - 1] = float("nan") if numel % 2 else float("inf")
    return plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", names())
def test_bytes_and_values_are_those_of_the_host(
    name: str, kind: str, device: torch.device, small: bool
) -> None:
    codec = find(name)
    wrong = []
    for numel in [*SIZES, *([] if small else [LARGE])]:
        values = values_of(kind, numel, codec.magnitude_max)
        here, there = (
            torch.empty(codec.encoded_bytes(numel), dtype=torch.uint8, device=where)
            for where in ("cpu", device)
        )
        codec.write(values, here)
        codec.write(values.to(device), there)
        if not torch.equal(here, there.cpu()):
            wrong.append(f"encoding {numel} elements")
        decoded = [codec.decode(part, torch.empty(numel, device=part.device)).cpu() for part in (here, there)]
        if not torch.equal(*(one.view(torch.int32) for one in decoded)) and kind != "not finite":
            wrong.append(f"decoding {numel} elements")
    assert not wrong, f"{name}, {kind}: the GPU differs in {wrong}"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", names())
def test_arbitrary_bytes_are_read_as_on_the_host(name: str, seed: int, device: torch.device) -> None:
    """Both devices decode any bytes of a hostile peer to the same values."""
    codec = find(name)
    chance = torch.Generator().manual_seed(seed)
    for numel in (1, 257, 4097):
        payload = torch.randint(256, (codec.encoded_bytes(numel),), dtype=torch.uint8, generator=chance)
        one, other = (
            codec.decode(part, torch.empty(numel, device=part.device)).cpu()
            for part in (payload, payload.to(device))
        )
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(0.0).view(torch.int32), other.nan_to_num(0.0).view(torch.int32))


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("rank", [1, 4, 5])
def test_powersgd_factors_expand_to_the_same_bits_at_any_matmul_precision(
    rank: int, precision: str, device: torch.device
) -> None:
    chance = torch.Generator().manual_seed(rank)
    p, q = torch.randn(700, rank, generator=chance), torch.randn(300, rank, generator=chance)
    there, here = torch.empty(700, 300, device=device), torch.empty(700, 300)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        expand(p.to(device), q.to(device), there)
    finally:
        torch.set_float32_matmul_precision(before)
    expand(p, q, here)
    assert torch.equal(there.cpu(), here)
