"""Every codec of this project, and one that a user adds, keeps to the contract of codecs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from averaging.reduction.layout import TensorLayout, schema_hash
from averaging.reduction.partition import plan_chunks
from swarm.compression import (
    PUBLIC_WIRE_ID_MAX,
    Buffer,
    Codec,
    find,
    find_wire_id,
    names,
    register,
    view_bytes,
    view_tensor,
)
from swarm.compression.codec import unregister
from swarm.core.errors import UsageError
from swarm.testing.codec_contract import check_codec, decoded, encoded

OWN = ("bfloat16", "float16", "float32", "int2", "int4", "int8", "sign", "topk")


@pytest.mark.parametrize("name", OWN)
def test_every_codec_satisfies_the_contract(name: str) -> None:
    check_codec(find(name))


@pytest.mark.parametrize("name", OWN)
def test_bytes_do_not_depend_on_threads(name: str) -> None:
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(3))
    before = torch.get_num_threads()
    found = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            payload = encoded(find(name), values)
            found.add((payload, decoded(find(name), payload, values.numel()).numpy().tobytes()))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


# SHA-256 of encodings; a change of one is a change of the format, which needs a new version of the codec
TRANSCRIPT = {
    "bfloat16": "d1621f89b3e95c43",
    "float16": "df0111e2e33fc8c5",
    "float32": "e227c1a70c618538",
    "int2": "b2847d8a71036801",
    "int4": "8b856ac709dd6f7c",
    "int8": "3fab62403e38f2c4",
    "sign": "43b83dc50dd44fe6",
    "topk": "bb2526d3dde9cc15",
}


@pytest.mark.parametrize("name", OWN)
def test_bytes_are_the_same_on_every_machine(name: str) -> None:
    """On any processor and any version of torch. The values are made of whole numbers, so that they are
    everywhere the same.
    """
    whole = (torch.arange(40_000, dtype=torch.int64) * 2_654_435_761) % 1_000_003
    values = (whole.to(torch.float32) - 500_000.0) * 2.0**-19
    payload = encoded(find(name), values * values * values)
    assert hashlib.sha256(payload).hexdigest()[:16] == TRANSCRIPT[name]


def test_wire_ids_do_not_change() -> None:
    assert {name: (find(name).wire_id, find(name).version) for name in OWN} == {
        "float32": (1, 1),
        "float16": (2, 1),
        "bfloat16": (3, 1),
        "int8": (4, 1),
        "int4": (5, 1),
        "int2": (6, 1),
        "sign": (7, 1),
        "topk": (8, 1),
    }
    assert set(OWN) <= set(names())


@dataclass(frozen=True, slots=True)
class Eighths:
    """A user's codec: whole eighths from -15.875 to 15.875, in a byte each."""

    name: str = "eighths"
    wire_id: int = PUBLIC_WIRE_ID_MAX + 1
    version: int = 1
    bits_per_element: float = 8.0
    magnitude_max: float = 15.875
    block_elements: int = 1 << 15

    def encoded_bytes(self, numel: int) -> int:
        return numel

    def error_bound(self, magnitude: float) -> float:
        return 1 / 16

    def encode(self, values: torch.Tensor, scratch: torch.Tensor) -> memoryview:
        out = scratch[: values.numel()]
        self.write(values, out)
        return view_tensor(out)

    def write(self, values: torch.Tensor, out: torch.Tensor) -> None:
        bad = ~(values.abs() <= self.magnitude_max)
        # 0 stands for what cannot be carried
        out.copy_(torch.where(bad, 0.0, torch.round(values * 8.0) + 128.0))

    def decode(self, payload: Buffer | torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        raw = payload if isinstance(payload, torch.Tensor) else view_bytes(payload)
        scratch.copy_(raw).sub_(128.0).mul_(0.125)
        return scratch.masked_fill_(raw == 0, float("nan"))

    def is_finite(self, payload: Buffer | torch.Tensor) -> bool:
        raw = payload if isinstance(payload, torch.Tensor) else view_bytes(payload)
        return not bool((raw == 0).any())

    def flaw(self, payload: Buffer | torch.Tensor, numel: int) -> str:
        if len(payload) != numel:
            return f"{numel} elements take {numel} bytes, not {len(payload)}"
        return "" if self.is_finite(payload) else "an element is NaN or infinity"


@pytest.fixture
def eighths() -> Iterator[Codec]:
    """Registered for one test."""
    register(Eighths())
    yield find("eighths")
    unregister("eighths")


def test_a_user_adds_a_codec(eighths: Codec) -> None:
    check_codec(eighths)
    assert find_wire_id(eighths.wire_id, 1) is eighths
    assert plan_chunks(100_000, [1.0, 1.0], eighths, 1 << 14).numel == 100_000
    with pytest.raises(UsageError, match="collides with 'eighths'"):
        register(Eighths(name="others"))
    with pytest.raises(UsageError, match="collides with 'int8'"):
        register(Eighths(name="tenths", wire_id=find("int8").wire_id))


def test_the_contract_finds_broken_codecs() -> None:
    class Wrong(Eighths):
        def error_bound(self, magnitude: float) -> float:
            return 1 / 32

    with pytest.raises(AssertionError, match="an error of"):
        check_codec(Wrong())

    class Blind(Eighths):
        def is_finite(self, payload: Buffer | torch.Tensor) -> bool:
            return True

    with pytest.raises(AssertionError, match="eighths"):
        check_codec(Blind())


def test_peers_with_other_codecs_never_meet(eighths: Codec) -> None:
    """The schema holds the codec's name, number and version; members compare it before they form a group."""
    layout = TensorLayout.of([torch.zeros(3, 4)])
    codecs: list[Codec] = [
        *(find(name) for name in names()),
        Eighths(version=2),
        Eighths(name="ninths"),
        Eighths(wire_id=2000),
    ]
    assert len({schema_hash(layout, codec) for codec in codecs}) == len(codecs)
    plan = plan_chunks(5000, [1.0], eighths, 1 << 14)
    assert plan.digest(Eighths()) != plan.digest(Eighths(version=2)) != plan.digest(find("int8"))
