"""The arithmetic of PowerSGD: bases that are orthonormal and the same everywhere, and which tensors become
matrices.
"""

from __future__ import annotations

import hashlib
import random
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from averaging.reduction.lowrank import (
    Factoring,
    Matrix,
    PowerSgd,
    device_product,
    device_subtract_product,
    expand,
    orthonormal,
    renewed,
    row_blocks,
    seeded,
    subtract_product,
)
from swarm.core.errors import UsageError
from tests.averaging.optim.allocations import Allocations


def matrix(n: int, m: int, rank: int, place: int = 0) -> Matrix:
    return Matrix(place, n, m, rank, 0, 0)


def grid(n: int, r: int, seed: int) -> torch.Tensor:
    """Values that do not depend on a library's normal distribution."""
    rng = random.Random(seed)
    return torch.tensor([[rng.randint(-999, 999) / 512 for _ in range(r)] for _ in range(n)])


@given(st.integers(1, 200), st.integers(1, 12), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_bases_are_orthonormal_and_span_the_columns(n: int, r: int, seed: int) -> None:
    columns = grid(n, min(n, r), seed)
    basis = orthonormal(columns).double()
    alive = (basis != 0).any(dim=0)
    kept = basis[:, alive]
    assert torch.allclose(kept.T @ kept, torch.eye(kept.shape[1]).double(), atol=1e-6)
    rest = columns.double() - kept @ (kept.T @ columns.double())
    assert float(rest.norm()) <= 1e-5 * (1 + float(columns.norm()))


def test_columns_that_depend_on_others_become_zeros() -> None:
    first = grid(50, 1, 1)
    basis = orthonormal(torch.cat([first, -3.0 * first, torch.zeros(50, 1), first + 1.0], dim=1))
    assert (basis != 0).any(dim=0).tolist() == [True, False, False, True]


def test_a_basis_is_the_same_to_the_bit_on_every_machine() -> None:
    """The sums of a library follow the processor's vectors; these bytes must not. On every machine that runs
    this test they are these.
    """
    expanded = torch.empty(700, 300)
    expand(grid(700, 5, 1), grid(300, 5, 2), expanded)
    found = (orthonormal(grid(1001, 5, 7)), seeded(b"run a", matrix(300, 77, 6)), expanded)
    hashes = [hashlib.sha256(one.contiguous().numpy().tobytes()).hexdigest()[:16] for one in found]
    assert hashes == ["e79d7d4281704163", "33f1cf19d0245fde", "ffe28d5b79d9b284"]


def test_the_random_start_depends_on_the_seed_and_the_matrix() -> None:
    found = seeded(b"a", matrix(300, 77, 6))
    assert torch.allclose(found.T @ found, torch.eye(6), atol=1e-6)
    others = [
        seeded(b"b", matrix(300, 77, 6)),
        seeded(b"a", matrix(301, 77, 6)),
        seeded(b"a", matrix(300, 77, 6, place=1)),
    ]
    assert not any(torch.equal(found, other) for other in others)


def test_a_matrix_that_was_zero_once_is_approximated_later() -> None:
    about = matrix(40, 30, 3)
    assert torch.allclose(renewed(torch.zeros(30, 3), b"s", about), seeded(b"s", about), atol=1e-6)
    q = torch.zeros(30, 3)
    q[:, 1] = grid(30, 1, 3)[:, 0]
    start = renewed(q, b"s", about)
    assert torch.allclose(start.T @ start, torch.eye(3), atol=1e-6)
    assert float((start[:, 1] @ q[:, 1]).abs()) > 0.5 * float(q[:, 1].norm())


@pytest.mark.parametrize(("n", "m", "r"), [(1, 1, 1), (3, 50_000, 2), (700, 300, 5), (40_000, 2, 2)])
def test_factors_expand_one_term_after_the_other(n: int, m: int, r: int) -> None:
    p, q = grid(n, r, 1), grid(m, r, 2)
    out = torch.full((n, m), float("nan"))
    expand(p, q, out)
    expected = p[:, :1] * q[:, 0]
    for k in range(1, r):
        expected = expected + p[:, k : k + 1] * q[:, k]
    assert torch.equal(out, expected)
    assert torch.allclose(out, p @ q.T, atol=1e-4)


def test_only_tensors_that_gain_become_matrices() -> None:
    shapes = [(256, 256), (256,), (64, 32, 3, 3), (), (2, 2), (0, 100), (1, 5000)]
    layout = Factoring.of(shapes, PowerSgd(rank=4))
    assert [(one.place, one.n, one.m, one.rank) for one in layout.matrices] == [
        (0, 256, 256, 4),
        (2, 64, 288, 4),
    ]
    assert layout.others == (1, 3, 4, 5, 6)
    assert layout.first_numel == 4 * (256 + 64)
    factors = 4 * (256 + 288)
    assert layout.other_starts == (factors, factors + 256, factors + 257, factors + 261, factors + 261)
    assert layout.second_numel == factors + 256 + 1 + 4 + 0 + 5000
    everything = Factoring.of(shapes, PowerSgd(rank=4, saving_min=0.0))
    assert [(one.place, one.rank) for one in everything.matrices] == [(0, 4), (2, 4), (4, 2), (6, 1)]
    assert Factoring.of([], PowerSgd()).second_numel == 0


@pytest.mark.parametrize(
    "wrong", [{"rank": 0}, {"rank": 2.0}, {"rank": 5000}, {"saving_min": -1.0}, {"saving_min": float("nan")}]
)
def test_invalid_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        PowerSgd(**wrong)  # type: ignore[arg-type]


# ---- memory


class Elsewhere(torch.Tensor):
    """Host memory that says it is on a CUDA device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")


def test_expanding_on_a_device_takes_a_bounded_temporary_and_makes_the_hosts_bits() -> None:
    p, q = grid(3000, 3, 1), grid(2500, 3, 2)
    here, there = torch.empty(3000, 2500), torch.empty(3000, 2500)
    expand(p, q, here)
    with Allocations() as allocated:
        expand(p.as_subclass(Elsewhere), q.as_subclass(Elsewhere), there.as_subclass(Elsewhere))
    assert torch.equal(there, here)
    assert max(allocated.sizes) <= 16 << 20 < 3000 * 2500 * 4


@pytest.mark.parametrize("transposed", [False, True])
def test_products_on_a_device_take_bounded_temporaries(transposed: bool) -> None:
    matrix = torch.zeros(3000, 2500)
    whole_bytes = matrix.numel() * 8  # in float64
    matrix = matrix.t() if transposed else matrix
    p, q = torch.zeros(matrix.shape[0], 3), torch.zeros(matrix.shape[1], 3)
    with Allocations() as allocated:
        device_product(matrix, q)
        device_subtract_product(matrix, p, q)
    assert max(allocated.sizes) <= 32 << 20 < whole_bytes


def test_subtracting_on_the_host_takes_a_bounded_temporary() -> None:
    matrix, p, q = torch.zeros(3000, 2500), torch.zeros(3000, 3), torch.zeros(2500, 3)
    tracemalloc.start()
    try:
        subtract_product(matrix, p, q)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 5 << 20 < matrix.numel() * 4


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 10_000))
@settings(max_examples=60, deadline=None)
def test_blocks_of_rows_cover_a_matrix(n: int, m: int, elements: int) -> None:
    cut = row_blocks((n, m), elements)
    assert [row for rows in cut for row in range(n)[rows]] == list(range(n))
    sizes = [rows.stop - rows.start for rows in cut]
    assert sizes[0] == max(sizes)
    assert max(sizes) * m <= max(elements, m)
