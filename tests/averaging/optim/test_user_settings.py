"""Torch settings that belong to the user's program: default dtype, default device, precision of matrix
products. Reducing gives the same bytes with all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from averaging.reduction.averages import Averages, ResultBuffer
from averaging.reduction.devices import Queues
from averaging.reduction.feedback import Feedback, Shard
from averaging.reduction.lowrank import (
    PowerSgd,
    device_product,
    device_subtract_product,
    host_product,
    host_subtract_product,
)
from averaging.reduction.partition import Chunk, plan_chunks
from averaging.reduction.powersgd import LowRank
from averaging.reduction.reduce import Contribution, blocks
from averaging.reduction.robust import RULES, Aggregation, Rows, prepare
from averaging.reduction.staging import Staging
from swarm.compression import find, names
from swarm.testing.torch_defaults import CHANGES, changed_defaults

CPU: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(device="cpu").manual_seed(seed), **CPU)


def bits(tensor: torch.Tensor) -> bytes:
    assert tensor.dtype == torch.float32
    return tensor.detach().contiguous().view(-1).numpy().tobytes()


# ---- default dtype and device


def aggregated(rule: str, clip: float | None, vectors: list[torch.Tensor]) -> tuple[bytes, tuple[int, ...]]:
    """Return the average of the vectors, the first as it is and the others as int8, block by block, and
    which were clipped.
    """
    codec, numel = find("int8"), vectors[0].numel()
    contributions = [Contribution(0, 1.0, vectors[0])]
    for place, vector in enumerate(vectors[1:], 1):
        scratch = torch.empty(codec.encoded_bytes(numel), dtype=torch.uint8, device="cpu")
        contributions.append(Contribution(place, 0.5, bytes(codec.encode(vector, scratch))))
    cut = blocks(Chunk(0, 0, 0, numel), codec)
    total, scratch = torch.empty(numel, **CPU), torch.empty(numel, **CPU)
    prepared = prepare(Aggregation(rule=rule, clip_to_median=clip), contributions, codec, cut, total, Rows())
    for block in cut:
        prepared.rule.compute(block, total[block.start : block.stop], scratch[: block.stop - block.start])
    return bits(total), prepared.clipped


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("clip", [None, 2.0])
@pytest.mark.parametrize("rule", RULES)
def test_an_aggregation_rule_makes_the_same_bytes_whatever_the_defaults_are(
    rule: str, clip: float | None, change: str
) -> None:
    vectors = [draw(seed, 40_000) for seed in range(5)]
    vectors[3] *= 1000.0
    expected = aggregated(rule, clip, vectors)
    with changed_defaults(change):
        assert aggregated(rule, clip, vectors) == expected


def fed_back(codec_name: str, values: list[torch.Tensor]) -> list[bytes]:
    """Run rounds with error feedback on both sides. Return what is sent, and the final residuals."""
    codec, numel = find(codec_name), values[0].numel()
    feedback = Feedback(numel, codec)
    span, found = Shard(start=100, stop=numel, members=b"ab"), []
    scratch = torch.empty(codec.encoded_bytes(numel), dtype=torch.uint8, device="cpu")
    for vector in values:
        opened = feedback.begin(span)
        given = opened.give(0, vector, torch.empty(numel, **CPU))
        payload = bytes(codec.encode(given, scratch))
        opened.sent(0, given, payload, torch.empty(numel, **CPU))
        average = vector[100:].clone()
        opened.correct(100, average)
        opened.reduced(100, average, bytes(codec.encode(average, scratch)), torch.empty(numel - 100, **CPU))
        opened.commit()
        found.append(payload)
    state = feedback.state_dict()
    return [*found, bits(state["sender"]), bits(state["reducer"])]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("codec", names())
def test_error_feedback_is_the_same_whatever_the_defaults_are(codec: str, change: str) -> None:
    values = [draw(seed, 9000) for seed in range(3)]
    expected = fed_back(codec, values)
    with changed_defaults(change):
        assert fed_back(codec, values) == expected


class Answer(Averages):
    """An average that is known already."""

    def __init__(self, average: torch.Tensor) -> None:
        super().__init__(
            plan_chunks(average.numel(), [1.0], find("float32"), 1 << 20), find("float32"), ResultBuffer()
        )
        self.average = average

    def write(self, target: Any) -> None:
        for start, piece in target.pieces(0, target.numel):
            piece.copy_(self.average[start : start + piece.numel()])

    def subtract(self, target: Any) -> None:
        for start, piece in target.pieces(0, target.numel):
            torch.sub(self.average[start : start + piece.numel()], piece, out=piece)


def staged(seed: int) -> list[bytes]:
    """Return the result of staging for tensors of several dtypes and strides, from a whole average and from
    a difference.
    """
    base = draw(seed, 40, 30)
    tensors = [
        draw(seed + 1, 500),
        base[:, :9],
        base[:, 9:].to(torch.bfloat16),
        draw(seed + 2, 7).to(torch.float64),
        base[:, 9:],
    ]
    staging, found = Staging(tensors), []
    for read_in_place in (True, False):
        vector = staging.take(read_in_place=read_in_place)
        pieces = [piece for _, piece in vector.pieces(0, vector.numel)]
        found += [bits(piece) for piece in pieces]
        answer = Answer(torch.cat(pieces) * 0.5)
        if read_in_place:
            staging.put(answer)
        else:
            staging.add_difference(answer)
        found += [bits(tensor.to(torch.float32)) for tensor in tensors]
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_staging_is_the_same_whatever_the_defaults_are(change: str) -> None:
    expected = staged(1)
    with changed_defaults(change):
        assert staged(1) == expected


def factored(rounds: int, queues: Queues | None = None) -> list[bytes]:
    """Run rounds of PowerSGD with one member, the last one from a difference. Return its tensors and its
    state.
    """
    tensors = [draw(1, 40, 60), draw(2, 60, 40).t(), draw(3, 33), draw(4, 16, 5, 7).to(torch.bfloat16)]
    state = LowRank(tensors, PowerSgd(rank=2), find("float32"), seed=b"x", queues=queues)
    found = []
    for nth in range(rounds):
        last = nth == rounds - 1
        for place, tensor in enumerate(tensors):
            tensor.copy_(draw(10 * nth + place, *tensor.shape))
        state.take(gives=True, keeps=last)
        first = state.first(alike=True)
        second = state.second(first.read(0, first.numel, torch.empty(first.numel, **CPU)))
        mean = second.read(0, second.numel, torch.empty(second.numel, **CPU))
        found += [bits(first.read(0, first.numel)), bits(mean)]
        opened = state.others.begin()
        opened.kept(0, second.numel)
        opened.commit()
        state.commit(mean, sent=True)
        (state.add_difference if last else state.put)()
        found += [bits(tensor.to(torch.float32)) for tensor in tensors]
        found += [bits(held) for held in (*state.state_dict()["held"], *state.state_dict()["starts"])]
    return [*found, repr(state.norms()).encode()]


@pytest.mark.parametrize("change", CHANGES)
def test_low_rank_rounds_are_the_same_whatever_the_defaults_are(change: str) -> None:
    expected = factored(3)
    with changed_defaults(change):
        assert factored(3) == expected


# ---- precision of products


class TensorFloat32(TorchDispatchMode):
    """Products of float32 matrices as on a GPU with TF32: factors keep 10 bits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "addmv", "dot"):
            args = (*args[:-2], *(_rounded(factor) for factor in args[-2:]))
        return func(*args, **(kwargs or {}))


def _rounded(factor: torch.Tensor) -> torch.Tensor:
    if factor.dtype != torch.float32:
        return factor
    return (factor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.fixture(params=["highest", "high", "medium"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """Set a value of torch.set_float32_matmul_precision for one test."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def test_low_rank_rounds_do_not_follow_the_precision_of_matrix_products(precision: str) -> None:
    with_this_precision = factored(2)
    with TensorFloat32():
        assert factored(2) == with_this_precision
    torch.set_float32_matmul_precision("highest")
    assert factored(2) == with_this_precision


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("n", "m", "r"), [(1, 1, 1), (300, 200, 4), (5000, 1100, 3)])
@pytest.mark.parametrize("product", [host_product, device_product])
def test_products_of_own_values_have_the_precision_of_float32(
    product: Any, n: int, m: int, r: int, transposed: bool
) -> None:
    matrix = draw(1, m, n).t() if transposed else draw(1, n, m)
    factor = draw(2, m, r)
    with TensorFloat32():
        found = product(matrix, factor)
    assert found.shape == (n, r)
    assert found.dtype == torch.float32
    expected = matrix.double() @ factor.double()
    assert float((found.double() - expected).abs().max()) <= 2e-6 * float(
        (matrix.double().abs() @ factor.double().abs()).max()
    )


@pytest.mark.parametrize(("n", "m", "r"), [(1, 1, 1), (300, 200, 4), (5000, 1100, 3)])
@pytest.mark.parametrize("subtract", [host_subtract_product, device_subtract_product])
def test_subtracted_values_have_the_precision_of_float32(subtract: Any, n: int, m: int, r: int) -> None:
    matrix, p, q = draw(1, n, m), draw(2, n, r), draw(3, m, r)
    expected = matrix.double() - p.double() @ q.double().t()
    with TensorFloat32():
        subtract(matrix, p, q)
    assert float((matrix.double() - expected).abs().max()) <= 2e-6 * float(expected.abs().max())


@pytest.mark.parametrize("subtract", [host_subtract_product, device_subtract_product])
@pytest.mark.parametrize("product", [host_product, device_product])
def test_nan_goes_through_products_without_a_warning(product: Any, subtract: Any) -> None:
    matrix = draw(1, 30, 20)
    matrix[3, 4], matrix[5, 6], matrix[7, :] = float("nan"), float("inf"), 3e38
    factor = draw(2, 20, 2).abs() + 1.0
    assert not product(matrix, factor)[[3, 5, 7]].isfinite().any()
    subtract(matrix, draw(3, 30, 2), factor)
    assert not bool(matrix[3, 4].isfinite())


def test_the_stand_in_for_tf32_rounds_products() -> None:
    matrix, factor = draw(1, 50, 60), draw(2, 60, 3)
    exact = torch.mm(matrix, factor)
    with TensorFloat32():
        assert not torch.allclose(torch.mm(matrix, factor), exact, atol=1e-5)
