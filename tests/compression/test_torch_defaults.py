"""Codecs under other defaults of torch, and for tensors on devices whose arithmetic is not trusted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarm.compression import Codec, exact_device, find
from swarm.compression.segments import SEGMENT_ELEMENTS
from swarm.testing.metal import on_metal
from swarm.testing.torch_defaults import CHANGES, changed_defaults

NAMES = ("bfloat16", "float16", "float32", "int2", "int4", "int8", "sign", "topk")
SIZES = (1, 100, 4096, 4096 * 3 + 7, SEGMENT_ELEMENTS, 9 * SEGMENT_ELEMENTS + 4099)


def inputs(seed: int) -> list[torch.Tensor]:
    """Float32 vectors on the host: of many sizes, normal and heavy-tailed, zeros, and one with NaN in it."""
    chance = torch.Generator().manual_seed(seed)
    found = [torch.randn(numel, generator=chance) ** power for numel in SIZES for power in (1, 3)]
    spoiled = torch.randn(5000, generator=chance)
    spoiled[1234] = float("nan")
    return [*found, torch.zeros(300), spoiled]


def everything(codec: Codec, values: torch.Tensor) -> tuple[Any, ...]:
    """All results of a codec for these values, computed without depending on torch's defaults."""
    size = codec.encoded_bytes(values.numel())
    payload = bytes(codec.encode(values, torch.empty(size, dtype=torch.uint8, device="cpu")))
    written = torch.empty(size, dtype=torch.uint8, device="cpu")
    codec.write(values, written)
    decoded = codec.decode(payload, torch.empty(values.numel(), dtype=torch.float32, device="cpu"))
    assert decoded.dtype == torch.float32
    flaw = codec.flaw(payload, values.numel())
    return (
        payload,
        written.numpy().tobytes(),
        decoded.numpy().tobytes(),
        codec.is_finite(payload),
        flaw,
        codec.flaw(b"", values.numel()),
    )


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", NAMES)
def test_a_codec_makes_the_same_bytes_whatever_the_defaults_are(name: str, change: str, seed: int) -> None:
    vectors = inputs(seed)
    expected = [everything(find(name), values) for values in vectors]
    with changed_defaults(change):
        found = [everything(find(name), values) for values in vectors]
    assert found == expected


# ---- devices whose arithmetic is not trusted


@pytest.mark.parametrize("name", NAMES)
def test_the_host_computes_for_tensors_on_mps(name: str) -> None:
    codec = find(name)
    for values in inputs(3):
        numel, size = values.numel(), codec.encoded_bytes(values.numel())
        payload, _, decoded, *_ = everything(codec, values)
        assert bytes(codec.encode(on_metal(values), torch.empty(size, dtype=torch.uint8))) == payload
        written = on_metal(torch.zeros(size, dtype=torch.uint8))
        codec.write(on_metal(values), written)
        assert written.as_subclass(torch.Tensor).numpy().tobytes() == payload
        for source in (payload, on_metal(torch.frombuffer(bytearray(payload), dtype=torch.uint8))):
            there = on_metal(torch.zeros(numel))
            assert codec.decode(source, there) is there
            assert there.as_subclass(torch.Tensor).numpy().tobytes() == decoded
        back = codec.decode(
            on_metal(torch.frombuffer(bytearray(payload), dtype=torch.uint8)), torch.zeros(numel)
        )
        assert back.device.type == "cpu"
        assert back.numpy().tobytes() == decoded


def test_the_stand_in_for_mps_refuses_arithmetic() -> None:
    with pytest.raises(AssertionError, match="the device was asked to compute"):
        on_metal(torch.ones(3)).abs()


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:7"])
def test_cpu_and_cuda_devices_compute_themselves(device: str) -> None:
    assert exact_device(torch.device(device)) == torch.device(device)


@pytest.mark.parametrize("device", ["mps", "mps:0", "xpu:1", "meta"])
def test_the_host_computes_for_every_other_device(device: str) -> None:
    assert exact_device(torch.device(device)) == torch.device("cpu")
