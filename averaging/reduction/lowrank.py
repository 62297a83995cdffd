"""The arithmetic of PowerSGD (Vogels, Karimireddy, Jaggi, arXiv 1905.13727): which tensors are matrices,
their factors, and the product of the factors.

Results that every member computes from averaged bytes are the same to the bit on every processor and device:
they use only products, sums, quotients and roots of single elements, whose results IEEE 754 fixes, and sums
of many in one order. Results that a member computes from its own values (`product`, `subtract_product`) need
not be, and are left to a library with the full precision of float32. torch's own products of float32 matrices
follow `torch.set_float32_matmul_precision` and `torch.backends`, settings of the whole process that belong to
the trainer, and may keep 10 bits of each factor or fewer. So the host multiplies with NumPy, and a CUDA
device in float64.

Shapes: a matrix is (n, m), its factors are `p` (n, r), with orthonormal columns, and `q` (m, r): matrix ≈ p
qᵀ.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from swarm.core.errors import UsageError

RANK_MAX = 1024
# fraction of a column's norm: a smaller remainder after projection is rounding error, and no direction
_REMAINDER_MIN = 2.0**-20
_HOST_ELEMENTS = 1 << 15  # processed at once on the host: fits the cache, and wakes no team of threads
# up to this many multiplications OpenBLAS, which NumPy uses, wakes no team of threads either
_SERIAL_PRODUCTS = 1 << 18
_TILE_ROWS = 8  # rows of a tile that is not as wide as the matrix
# processed at once on a device: a temporary of 16 MiB (float64: 32 MiB), whatever the size of the matrix
_DEVICE_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSgd:
    """Average matrices by factors of low rank, in two all-reduces; for gradients and other differences. The
    settings must be the same on all peers.
    """

    rank: int = 4  # larger: a better approximation, and traffic in proportion
    # a tensor travels as factors where these have at most 1 / saving_min of its elements, else whole, with
    # the second ones. 0.0: always
    saving_min: float = 2.0

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or not 1 <= self.rank <= RANK_MAX:
            raise UsageError(
                f"the rank of PowerSGD is a whole number from 1 to {RANK_MAX}, not {self.rank!r}"
            )
        if not 0.0 <= self.saving_min < float("inf"):
            raise UsageError(
                "saving_min is by how much factors must be smaller than their matrix, 0 for always, not "
                f"{self.saving_min!r}"
            )

    @property
    def compatibility_tag(self) -> str:
        """Return the settings as text: only peers with equal tags meet."""
        return f"powersgd {self.rank} {self.saving_min:g}"


@dataclass(frozen=True, slots=True)
class Matrix:
    """One tensor as a matrix: its first dimension by the product of all others."""

    place: int  # in the list of tensors
    n: int
    m: int
    rank: int
    p_start: int  # start of p, by rows, in the vector of the first all-reduce
    q_start: int  # start of q, by rows, in that of the second

    @property
    def p_stop(self) -> int:
        """Return the end of p in the vector of the first all-reduce."""
        return self.p_start + self.n * self.rank

    @property
    def q_stop(self) -> int:
        """Return the end of q in the vector of the second all-reduce."""
        return self.q_start + self.m * self.rank


@dataclass(frozen=True, slots=True)
class Factoring:
    """The layout of a list of tensors in the two vectors: the first holds the p of all matrices; the second
    holds their q, then all other tensors.
    """

    matrices: tuple[Matrix, ...]
    others: tuple[int, ...]  # places of tensors that travel as they are
    other_starts: tuple[int, ...]  # where each of them begins in the second vector
    first_numel: int
    second_numel: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], settings: PowerSgd) -> Factoring:
        """Return the layout for tensors of these shapes with these `settings`. It depends on nothing else, so
        that all members agree.
        """
        matrices: list[Matrix] = []
        others: list[int] = []
        first = second = 0
        for place, shape in enumerate(shapes):
            n, m = (shape[0], math.prod(shape[1:])) if len(shape) >= 2 else (0, 0)
            rank = min(settings.rank, n, m)
            if not rank or (n + m) * rank * settings.saving_min > n * m:
                others.append(place)
                continue
            matrices.append(Matrix(place, n, m, rank, first, second))
            first, second = matrices[-1].p_stop, matrices[-1].q_stop
        edges = list(itertools.accumulate((math.prod(shapes[place]) for place in others), initial=second))
        return cls(tuple(matrices), tuple(others), tuple(edges[:-1]), first, edges[-1])


def row_blocks(shape: Sequence[int], elements: int) -> list[slice]:
    """Cut the rows of a matrix of this shape into blocks of at most `elements` elements, or one row each. The
    first is the largest.
    """
    n, m = shape
    rows = max(elements // max(m, 1), 1)
    return [slice(start, min(start + rows, n)) for start in range(0, n, rows)]


def product(matrix: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return matrix (n, m) @ factor (m, r), float32 on their device, which is the host or a CUDA device;
    `matrix` may be transposed.

    As precise as float32 allows, whatever torch's settings are; the last bits depend on the library.
    """
    return host_product(matrix, factor) if matrix.device.type == "cpu" else device_product(matrix, factor)


def host_product(matrix: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Compute `product` on the host, with NumPy, which ignores torch's settings."""
    with np.errstate(all="ignore"):  # values may be NaN or infinity: found when they are encoded
        return torch.from_numpy(np.matmul(matrix.numpy(), factor.numpy()))


def device_product(matrix: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Compute `product` on a device with float64: each element is summed in float64 and rounded once."""
    wide = factor.to(torch.float64)
    out = factor.new_empty(matrix.shape[0], factor.shape[1])
    for rows in row_blocks(matrix.shape, _DEVICE_ELEMENTS):
        out[rows].copy_(torch.mm(matrix[rows].to(torch.float64), wide))
    return out


def subtract_product(matrix: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> None:
    """Subtract p (n, r) qᵀ (m, r) from matrix (n, m) in place, all float32 on one device; the same precision
    as `product`.
    """
    (host_subtract_product if matrix.device.type == "cpu" else device_subtract_product)(matrix, p, q)


def host_subtract_product(matrix: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> None:
    """Compute `subtract_product` on the host: in tiles, each on the calling thread alone."""
    target, left, right = matrix.numpy(), p.numpy(), np.ascontiguousarray(q.numpy().T)
    (n, m), rank = target.shape, len(right)
    elements = max(min(_HOST_ELEMENTS, _SERIAL_PRODUCTS // rank), 1)
    width = min(max(elements // _TILE_ROWS, 1), m)
    height = max(elements // width, 1)
    term = np.empty(height * width, np.float32)
    multiply = np.multiply if rank == 1 else np.matmul  # by broadcasting: NumPy's matmul is slow there
    with np.errstate(all="ignore"):
        for top, left_edge in itertools.product(range(0, n, height), range(0, m, width)):
            tile = target[top : top + height, left_edge : left_edge + width]
            work = term[: tile.size].reshape(tile.shape)
            multiply(left[top : top + height], right[:, left_edge : left_edge + width], out=work)
            np.subtract(tile, work, out=tile)


def device_subtract_product(matrix: torch.Tensor, p: torch.Tensor, q: torch.Tensor) -> None:
    """Compute `subtract_product` on a device with float64."""
    left, right = p.to(torch.float64), q.to(torch.float64).t()
    for rows in row_blocks(matrix.shape, _DEVICE_ELEMENTS):
        matrix[rows].copy_(matrix[rows].to(torch.float64).addmm_(left[rows], right, alpha=-1.0))


def seeded(seed: bytes, matrix: Matrix) -> torch.Tensor:
    """Return the q (m, r) from which a matrix starts before its first round: orthonormal, and the same for
    every peer with this `seed`.
    """
    text = b"%s %d %d %d %d" % (seed, matrix.place, matrix.n, matrix.m, matrix.rank)
    size = matrix.m * matrix.rank
    # SHAKE, since a library's random numbers may change with its version.
    drawn = np.frombuffer(hashlib.shake_256(text).digest(2 * size), "<u2").astype(np.float64) - 32767.5
    return _orthonormal(drawn.reshape(matrix.rank, matrix.m))


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the space of the columns (n, r; float32 on the host): Gram-Schmidt in
    float64, twice, rounded to float32.

    A column that depends on those before it becomes zeros. The result is the same to the bit on every
    machine.
    """
    given: npt.NDArray[np.float32] = columns.numpy()
    return _orthonormal(np.ascontiguousarray(given.T, np.float64))


def renewed(q: torch.Tensor, seed: bytes, matrix: Matrix) -> torch.Tensor:
    """Return the start of the next round after an average with this q: its columns, orthonormal, with random
    ones where columns are zero.
    """
    found = orthonormal(q)
    empty = (found == 0.0).all(dim=0)
    # The matrix was all zeros or of a lower rank once; without new columns nothing would ever show in these
    # again.
    if bool(empty.any()):
        drawn = seeded(seed, matrix)
        found = orthonormal(torch.where(empty, drawn, found))
    return found


def _orthonormal(rows: npt.NDArray[np.float64]) -> torch.Tensor:
    """Return the rows (r, n), which are overwritten, made orthonormal, as columns."""
    for k, row in enumerate(rows):
        size = math.sqrt(_sum(row * row))
        for _ in range(2):  # one pass leaves the rounding errors of nearly parallel columns
            if k:
                for share, other in zip(_sum(rows[:k] * row), rows[:k], strict=True):
                    row -= share * other
        left = math.sqrt(_sum(row * row))
        if left > _REMAINDER_MIN * size:
            row /= left
        else:
            row[:] = 0.0
    return torch.from_numpy(np.ascontiguousarray(rows.T, np.float32))


def _sum(terms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the sum over the last axis, by adding halves to each other, in the same order everywhere. The
    order of a library's sum depends on the processor.
    """
    while (count := terms.shape[-1]) > 1:
        half = count // 2
        folded = terms[..., :half] + terms[..., half : 2 * half]
        if count % 2:
            folded[..., 0] += terms[..., -1]
        terms = folded
    return terms[..., 0] if terms.shape[-1] else np.zeros(terms.shape[:-1])


def expand(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """Write p (n, r) qᵀ to `out` (n, m), all float32 on one device: one term after the other, so that all
    devices round equally.
    """
    columns = q.t().contiguous()
    blocks = row_blocks(out.shape, _HOST_ELEMENTS if out.device.type == "cpu" else _DEVICE_ELEMENTS)
    term = torch.empty_like(out[blocks[0]])
    for rows in blocks:
        target, left = out[rows], p[rows]
        work = term[: len(target)]
        torch.mul(left[:, :1], columns[0], out=target)
        for k in range(1, columns.shape[0]):
            target.add_(torch.mul(left[:, k : k + 1], columns[k], out=work))
