"""Beam search for the k best experts of a grid for each sample, without looking at the whole grid.

The score of expert (i, j, …) is the sum of its coordinates' scores, one per dimension (product keys: Lample
et al., "Large Memory Layers with Product Keys", 2019, section 3). The experts that exist are learned prefix
by prefix. A prefix's bound is its own score plus the best that each further dimension could add. The prefixes
whose bounds are best for some sample are opened first, for all samples together, and a sample is done once
its k-th best expert reaches the best bound that is left. The result is that of an exhaustive search, with or
without holes in the grid, unless the limit on opened prefixes ends the search early (`certain` says which).

Shapes: B samples, N_d coordinates of dimension d, F prefixes that may be opened, M experts found in one step,
K best experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from swarm.core.errors import UsageError

Prefix = tuple[int, ...]

_NO_SCORE = float("-inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamLimits:
    """Limits of a search."""

    # prefixes that each sample may open at a time. Too small: more round trips; too large: needless reads
    width: int = 4
    prefixes_per_step_max: int = 64  # opened together; those not cached are read from the DHT
    prefixes_max: int = 1024  # opened by one search, which then ends with what it has found
    elements_max: int = 1 << 22  # elements that one step holds in memory for a part of the batch

    def __post_init__(self) -> None:
        if min(self.width, self.prefixes_per_step_max, self.prefixes_max, self.elements_max) < 1:
            raise UsageError("the limits of a search must be positive")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Selection:
    """The best experts. `experts` are in the order in which they were found; `indices_BK` holds int64 indices
    into them, best first, and -1 where there were no more.
    """

    experts: tuple[Prefix, ...]
    indices_BK: torch.Tensor
    certain: bool  # the result equals that of an exhaustive search


class BeamSearch:
    """A search. Call `wanted` and pass what was read to `opened` until nothing is wanted; then take `result`.

    `scores` has for each dimension a float tensor [B, N_d] on the CPU, higher is better; `dimensions` gives
    their coordinates.
    """

    def __init__(
        self,
        scores: Sequence[torch.Tensor],
        dimensions: Sequence[range],
        k: int,
        limits: BeamLimits | None = None,
    ) -> None:
        if (
            k < 1
            or not scores
            or [score.shape[1] for score in scores] != [len(dimension) for dimension in dimensions]
        ):
            raise UsageError(
                "a search needs k of at least 1, and for each dimension as many scores as it has coordinates"
            )
        self._limits = limits or BeamLimits()
        self._scores, self._dimensions = list(scores), list(dimensions)
        batch = scores[0].shape[0]
        best_per_dimension = torch.stack(
            [score.amax(dim=1) if batch else score.new_zeros(0) for score in scores]
        )
        # [D + 1, B]: the largest score that the dimensions from d on can add
        self._remaining_max = torch.cat(
            [best_per_dimension.flip(0).cumsum(0).flip(0), best_per_dimension.new_zeros(1, batch)]
        )
        self._best_BK = scores[0].new_full((batch, k), _NO_SCORE)
        self._indices_BK = torch.full((batch, k), -1, dtype=torch.int64, device="cpu")
        self._experts: list[Prefix] = []
        self._frontier: list[Prefix] = [()]
        self._base_BF = scores[0].new_zeros(batch, 1)
        self._openings_left = self._limits.prefixes_max
        self._certain = True

    def wanted(self) -> list[Prefix]:
        """Return the prefixes to open next, those that most samples want first; empty when the search is
        over.
        """
        if not self._frontier or not len(self._best_BK):
            return []
        bounds_BF = self._bounds()
        bounds_BF = bounds_BF.masked_fill(bounds_BF <= self._best_BK[:, -1:], _NO_SCORE)
        values, places = bounds_BF.topk(min(self._limits.width, len(self._frontier)), dim=1)
        votes = torch.bincount(places[values > _NO_SCORE], minlength=len(self._frontier))
        count = int((votes > 0).sum())
        if not count:
            return []
        if not self._openings_left:
            self._certain = False
            return []
        ranked = votes.argsort(descending=True, stable=True)[
            : min(count, self._limits.prefixes_per_step_max, self._openings_left)
        ]
        return [self._frontier[place] for place in ranked.tolist()]

    def opened(self, children: Mapping[Prefix, Iterable[int]]) -> None:
        """Add the children of prefixes that were wanted: their coordinates, at the last dimension those of
        live experts. Prefixes that were not wanted are ignored.
        """
        places = {prefix: place for place, prefix in enumerate(self._frontier)}
        found = [
            (places[prefix], prefix, child)
            for prefix, below in children.items()
            if prefix in places
            for child in below
        ]
        depths: dict[int, list[tuple[int, Prefix, int]]] = {}
        for item in found:
            depth = len(item[1])
            if item[2] in self._dimensions[depth]:
                depths.setdefault(depth, []).append(item)
        base_BF = self._base_BF
        grown = []
        more: list[Prefix] = []
        for depth, items in depths.items():
            if depth + 1 == len(self._dimensions):
                self._add_experts(depth, items)
            else:
                grown.append(self._child_scores(base_BF, depth, items))
                more += [(*prefix, child) for _, prefix, child in items]
        kept = [place for place, prefix in enumerate(self._frontier) if prefix not in children]
        self._openings_left -= len(self._frontier) - len(kept)
        self._frontier = [self._frontier[place] for place in kept] + more
        self._base_BF = torch.cat([base_BF[:, kept], *grown], dim=1)

    def result(self) -> Selection:
        """Return the best experts found."""
        return compact(self._experts, self._indices_BK, self._certain)

    def _bounds(self) -> torch.Tensor:
        depths = torch.tensor([len(prefix) for prefix in self._frontier], device="cpu")
        return self._base_BF + self._remaining_max[depths].T

    def _child_scores(
        self, base_BF: torch.Tensor, depth: int, items: Sequence[tuple[int, Prefix, int]]
    ) -> torch.Tensor:
        parents = torch.tensor([place for place, _, _ in items], device="cpu")
        first = self._dimensions[depth].start
        columns = torch.tensor([child - first for _, _, child in items], device="cpu")
        return base_BF[:, parents] + self._scores[depth][:, columns]

    def _add_experts(self, depth: int, items: Sequence[tuple[int, Prefix, int]]) -> None:
        """Add found experts: keep the K best of them and the earlier ones, a part of the batch at a time."""
        numbers = torch.arange(len(self._experts), len(self._experts) + len(items), device="cpu")
        self._experts += [(*prefix, child) for _, prefix, child in items]
        batch, k = self._best_BK.shape
        rows = max(1, self._limits.elements_max // (len(items) + k))
        parents = torch.tensor([place for place, _, _ in items], device="cpu")
        columns = torch.tensor([child - self._dimensions[depth].start for _, _, child in items], device="cpu")
        for start in range(0, batch, rows):
            part = slice(start, min(start + rows, batch))
            scores = self._base_BF[part][:, parents] + self._scores[depth][part][:, columns]
            scores = torch.cat([self._best_BK[part], scores], dim=1)
            indices = torch.cat([self._indices_BK[part], numbers.expand(len(scores), -1)], dim=1)
            best, places = scores.topk(k, dim=1)
            self._best_BK[part] = best
            self._indices_BK[part] = indices.gather(1, places)


def compact(experts: Sequence[Prefix], indices_BK: torch.Tensor, certain: bool) -> Selection:
    """Return the selection without the experts that no sample has selected."""
    # the last entry stands for -1
    renumbered = torch.full((len(experts) + 1,), -1, dtype=torch.int64, device="cpu")
    used = torch.bincount(indices_BK[indices_BK >= 0], minlength=len(experts)).nonzero().flatten()
    renumbered[used] = torch.arange(len(used), device="cpu")
    return Selection(tuple(experts[place] for place in used.tolist()), renumbered[indices_BK], certain)
