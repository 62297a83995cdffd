"""When a mixture layer has waited long enough: the answers of experts, counted per sample.

Each sample chose up to K experts, and needs `k_min` of them. Once every sample has that many, or can get no
more, those who are still out get a little longer (`patience`), and then it is over: late ones are dropped. A
pure machine; experts are numbers, `slots_BK` their places per sample (-1: none).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarm.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherTimeouts:
    """How long to wait for those who are still out, after all samples have enough."""

    after_k_min_s: float | None = None  # None: `share` of what that took, within the two bounds below
    share: float = 1.0
    least_s: float = 0.1
    most_s: float = 5.0

    def __post_init__(self) -> None:
        if self.after_k_min_s is not None and not self.after_k_min_s >= 0.0:
            raise UsageError(
                f"timeout_after_k_min_s is a number of seconds from 0 up, or None, not {self.after_k_min_s!r}"
            )
        if not (self.share >= 0.0 and self.least_s >= 0.0 and self.most_s >= 0.0):
            raise UsageError("patience needs a share, least_s and most_s of at least 0")

    def after_s(self, took_s: float) -> float:
        if self.after_k_min_s is not None:
            return self.after_k_min_s
        return max(min(self.share * took_s, self.most_s), self.least_s)


class Gathering:
    """One pass, forward or backward. `deadline_s` ends it in any case.

    Whoever is still out when nothing has been heard for a while is doubted (`stalled`, `doubt`): others can
    be asked in its place, and its answer still counts should it come.
    """

    def __init__(
        self, batch: int, k_min: int, patience: GatherTimeouts, begun_s: float, deadline_s: float
    ) -> None:
        self._k_min, self._patience = k_min, patience
        self._begun_s, self._until_s = begun_s, deadline_s
        self._answered_B = torch.zeros(batch, dtype=torch.int64, device="cpu")
        self._open_B = torch.zeros(batch, dtype=torch.int64, device="cpu")
        self._doubted_B = torch.zeros(batch, dtype=torch.int64, device="cpu")
        self._rows: dict[int, torch.Tensor] = {}  # of those that are still out
        self._doubted: set[int] = set()
        self._usual_s: dict[int, float] = {}
        self._enough_s: float | None = None
        self._heard_s = begun_s
        self._heard = False  # of anybody at all

    def expect(self, expert: int, rows: torch.Tensor, now_s: float, usual_s: float = 0.0) -> None:
        """This expert was asked for these samples (distinct places in the batch). Who was asked to replace
        others starts patience anew.

        `usual_s`: how long it may well take, going by its answers of late.
        """
        self._rows[expert] = rows
        self._usual_s[expert] = usual_s
        self._open_B[rows] += 1
        self._enough_s, self._heard_s = None, now_s

    def answered(self, expert: int, now_s: float) -> None:
        rows = self._gone(expert, now_s)
        if rows is not None:
            self._answered_B[rows] += 1
            self._look(now_s)

    def failed(self, expert: int, now_s: float) -> None:
        if self._gone(expert, now_s) is not None:
            self._look(now_s)

    def doubt(self) -> list[int]:
        """Count no longer on those that are out; those of them that were counted on until now."""
        new = [expert for expert in self._rows if expert not in self._doubted]
        for expert in new:
            rows = self._rows[expert]
            self._open_B[rows] -= 1
            self._doubted_B[rows] += 1
        self._doubted.update(new)
        return new

    @property
    def out(self) -> list[int]:
        """Experts that have neither answered nor failed."""
        return list(self._rows)

    @property
    def short_rows(self) -> torch.Tensor:
        """Samples that cannot get `k_min` answers any more, whatever those do that are out and not doubted."""
        return (self._answered_B + self._open_B < self._k_min).nonzero().flatten()

    @property
    def lacking_rows(self) -> torch.Tensor:
        """Samples that have fewer than `k_min` answers now."""
        return (self._answered_B < self._k_min).nonzero().flatten()

    def stalled_s(self) -> float | None:
        """When those who are out and not doubted have to be doubted, if nothing is heard until then; None:
        there are none.
        """
        counted_on = [expert for expert in self._rows if expert not in self._doubted]
        if not counted_on:
            return None
        usual_s = max(self._usual_s[expert] for expert in counted_on)
        return self._heard_s + max(self._patience.after_s(self._heard_s - self._begun_s), usual_s)

    def deadline_s(self) -> float:
        """When to ask `over` again at the latest."""
        if self._enough_s is not None:
            return min(self._until_s, self._enough_s + self._patience.after_s(self._enough_s - self._begun_s))
        # nobody is needed: one who is out holds up no longer than the others took
        if not self._k_min and self._heard:
            stalled_s = self.stalled_s()
            return min(self._until_s, stalled_s if stalled_s is not None else self._heard_s)
        return self._until_s

    def over(self, now_s: float) -> bool:
        return not self._rows or now_s >= self.deadline_s()

    def _gone(self, expert: int, now_s: float) -> torch.Tensor | None:
        rows = self._rows.pop(expert, None)
        if rows is not None:
            (self._doubted_B if expert in self._doubted else self._open_B)[rows] -= 1
            self._heard_s, self._heard = now_s, True
        return rows

    def _look(self, now_s: float) -> None:
        if self._enough_s is None:
            # with k_min of 0 a sample still waits for its first answer, or until there is nobody left to wait
            # for
            needed = max(self._k_min, 1)
            if bool(((self._answered_B >= needed) | (self._open_B + self._doubted_B == 0)).all()):
                self._enough_s = now_s
