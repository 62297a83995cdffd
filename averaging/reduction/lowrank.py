"""The arithmetic of PowerSGD (Vogels, Karimireddy, Jaggi, arXiv 1905.13727): which tensors are matrices,
their factors, and the way back.

What every member computes from averaged bytes comes out the same to the bit, whatever its processor or
device: only products, sums, quotients and roots of single elements, whose results IEEE 754 fixes, and sums of
many in one order. What a member computes from its own values (`product`) need not, and is left to the fastest
library at hand.

Shapes: a matrix is (n, m), its factors are `p` (n, r), with orthonormal columns, and `q` (m, r): matrix ≈ p
qᵀ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from swarm.core.errors import UsageError

RANK_MAX = 1024
# of a column's norm: what is left of it beside the columns before is rounding, and no direction
_DEAD = 2.0**-20
_HOST_ELEMENTS = 1 << 15  # worked on at once on the host: fits the cache, and wakes no team of threads


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSgd:
    """Average matrices by factors of this rank, in two all-reduces; for gradients and other differences. Must
    be the same on all peers.
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
                f"saving_min is by how much factors must be smaller than their matrix, 0 for always, not {self.saving_min!r}"
            )

    @property
    def terms(self) -> str:
        """What peers compare."""
        return f"powersgd {self.rank} {self.saving_min:g}"


@dataclass(frozen=True, slots=True)
class Matrix:
    """One tensor as a matrix: its first dimension against all others."""

    place: int  # in the list of tensors
    n: int
    m: int
    rank: int
    p_start: int  # of p, by rows, in the vector of the first all-reduce
    q_start: int  # of q, by rows, in that of the second

    @property
    def p_stop(self) -> int:
        return self.p_start + self.n * self.rank

    @property
    def q_stop(self) -> int:
        return self.q_start + self.m * self.rank


@dataclass(frozen=True, slots=True)
class Factoring:
    """How a list of tensors lies in the two vectors: in the first the p of all matrices; in the second their
    q, then all other tensors.
    """

    matrices: tuple[Matrix, ...]
    others: tuple[int, ...]  # places of tensors that travel as they are
    other_starts: tuple[int, ...]  # where each of them begins in the second vector
    first_numel: int
    second_numel: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], terms: PowerSgd) -> Factoring:
        """What `terms` make of tensors of these shapes: it depends on nothing else, so that all members
        agree.
        """
        matrices: list[Matrix] = []
        others: list[int] = []
        first = second = 0
        for place, shape in enumerate(shapes):
            n, m = (shape[0], math.prod(shape[1:])) if len(shape) >= 2 else (0, 0)
            rank = min(terms.rank, n, m)
            if not rank or (n + m) * rank * terms.saving_min > n * m:
                others.append(place)
                continue
            matrices.append(Matrix(place, n, m, rank, first, second))
            first, second = matrices[-1].p_stop, matrices[-1].q_stop
        edges = list(accumulate((math.prod(shapes[place]) for place in others), initial=second))
        return cls(tuple(matrices), tuple(others), tuple(edges[:-1]), first, edges[-1])


def product(matrix: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """matrix (n, m) @ factor (m, r), or with `matrix.t()` the other side's: float32, on their device, as its
    library rounds.
    """
    return torch.mm(matrix, factor)


def seeded(seed: bytes, matrix: Matrix) -> torch.Tensor:
    """The q (m, r) from which a matrix starts when there was no round yet: orthonormal, and the same wherever
    `seed` is.
    """
    text = b"%s %d %d %d %d" % (seed, matrix.place, matrix.n, matrix.m, matrix.rank)
    size = matrix.m * matrix.rank
    # shake: a stream of bytes that no library's next version draws differently
    drawn = np.frombuffer(hashlib.shake_256(text).digest(2 * size), "<u2").astype(np.float64) - 32767.5
    return _orthonormal(drawn.reshape(matrix.rank, matrix.m))


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of what the columns (n, r; float32 on the host) span: Gram-Schmidt in float64,
    twice, rounded to float32.

    A column that depends on those before it becomes zeros. Bit by bit the same on every machine.
    """
    given: npt.NDArray[np.float32] = columns.numpy()
    return _orthonormal(np.ascontiguousarray(given.T, np.float64))


def renewed(q: torch.Tensor, seed: bytes, matrix: Matrix) -> torch.Tensor:
    """What the next round starts from after an average with this q: its columns, orthonormal; drawn ones
    where it has none.
    """
    found = orthonormal(q)
    dead = (found == 0.0).all(dim=0)
    # a matrix that was all zeros, or of a lower rank, once: nothing would ever show in these columns again
    if bool(dead.any()):
        drawn = seeded(seed, matrix)
        found = orthonormal(torch.where(dead, drawn, found))
    return found


def _orthonormal(rows: npt.NDArray[np.float64]) -> torch.Tensor:
    """The rows (r, n), which are spent, made orthonormal, as columns."""
    for k, row in enumerate(rows):
        size = math.sqrt(_sum(row * row))
        for _ in range(2):  # once leaves what rounding made of nearly parallel columns
            if k:
                for share, other in zip(_sum(rows[:k] * row), rows[:k], strict=True):
                    row -= share * other
        left = math.sqrt(_sum(row * row))
        if left > _DEAD * size:
            row /= left
        else:
            row[:] = 0.0
    return torch.from_numpy(np.ascontiguousarray(rows.T, np.float32))


def _sum(terms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The sum over the last axis, in one order everywhere: halves are added to each other. A library's own
    sum follows the processor.
    """
    while (count := terms.shape[-1]) > 1:
        half = count // 2
        folded = terms[..., :half] + terms[..., half : 2 * half]
        if count % 2:
            folded[..., 0] += terms[..., -1]
        terms = folded
    return terms[..., 0] if terms.shape[-1] else np.zeros(terms.shape[:-1])


def expand(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """out (n, m) = p (n, r) qᵀ, all float32 on one device: a term after the other, so that no device rounds
    differently.
    """
    columns = q.t().contiguous()
    n, m = out.shape
    rows = n if out.device.type != "cpu" else max(_HOST_ELEMENTS // max(m, 1), 1)
    term = torch.empty(min(rows, n), m, device=out.device)
    for start in range(0, n, rows):
        target, left = out[start : start + rows], p[start : start + rows]
        work = term[: target.shape[0]]
        torch.mul(left[:, :1], columns[0], out=target)
        for k in range(1, columns.shape[0]):
            target.add_(torch.mul(left[:, k : k + 1], columns[k], out=work))
