"""When a mixture layer has waited long enough: the answers of experts, counted per sample.

Each sample chose up to K experts, and needs `k_min` of them. Once every sample has that many, or can get no more, those who are still out
get a little longer (`patience`), and then it is over: late ones are dropped. A pure machine; experts are numbers, `slots_BK` their places
per sample (-1: none).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarm.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for those who are still out, after all samples have enough."""

    after_k_min_s: float | None = None  # None: `share` of what that took, within the two bounds below
    share: float = 1.0
    least_s: float = 0.1
    most_s: float = 5.0

    def __post_init__(self) -> None:
        if self.after_k_min_s is not None and not self.after_k_min_s >= 0.0:
            raise UsageError(f"timeout_after_k_min_s is a number of seconds from 0 up, or None, not {self.after_k_min_s!r}")
        if not (self.share >= 0.0 and 0.0 <= self.least_s <= self.most_s):
            raise UsageError("patience needs a share of at least 0, and 0 <= least_s <= most_s")

    def after_s(self, took_s: float) -> float:
        if self.after_k_min_s is not None:
            return self.after_k_min_s
        return min(max(self.share * took_s, self.least_s), self.most_s)


class Gathering:
    """One pass, forward or backward. `deadline_s` ends it in any case."""

    def __init__(self, batch: int, k_min: int, patience: Patience, begun_s: float, deadline_s: float) -> None:
        self._k_min, self._patience = k_min, patience
        self._begun_s, self._until_s = begun_s, deadline_s
        self._answered_B = torch.zeros(batch, dtype=torch.int64)
        self._open_B = torch.zeros(batch, dtype=torch.int64)
        self._rows: dict[int, torch.Tensor] = {}  # of those that are still out
        self._enough_s: float | None = None

    def expect(self, expert: int, rows: torch.Tensor) -> None:
        """This expert was asked for these samples (distinct places in the batch). Who was asked to replace others starts patience anew."""
        self._rows[expert] = rows
        self._open_B[rows] += 1
        self._enough_s = None

    def answered(self, expert: int, now_s: float) -> None:
        rows = self._rows.pop(expert, None)
        if rows is not None:
            self._open_B[rows] -= 1
            self._answered_B[rows] += 1
            self._look(now_s)

    def failed(self, expert: int, now_s: float) -> None:
        rows = self._rows.pop(expert, None)
        if rows is not None:
            self._open_B[rows] -= 1
            self._look(now_s)

    @property
    def out(self) -> list[int]:
        """Experts that have neither answered nor failed."""
        return list(self._rows)

    @property
    def short_rows(self) -> torch.Tensor:
        """Samples that cannot get `k_min` answers any more, whatever those do that are still out."""
        return (self._answered_B + self._open_B < self._k_min).nonzero().flatten()

    @property
    def lacking_rows(self) -> torch.Tensor:
        """Samples that have fewer than `k_min` answers now."""
        return (self._answered_B < self._k_min).nonzero().flatten()

    def deadline_s(self) -> float:
        """When to ask `over` again at the latest."""
        if self._enough_s is None:
            return self._until_s
        return min(self._until_s, self._enough_s + self._patience.after_s(self._enough_s - self._begun_s))

    def over(self, now_s: float) -> bool:
        return not self._rows or now_s >= self.deadline_s()

    def _look(self, now_s: float) -> None:
        if self._enough_s is None:
            # with k_min of 0 a sample still waits for its first answer, or until there is nobody left to wait for
            needed = max(self._k_min, 1)
            if bool(((self._answered_B >= needed) | (self._open_B == 0)).all()):
                self._enough_s = now_s
