"""Gathering of experts' answers: it decides, per sample, when a mixture layer has waited long enough.

Each sample selected up to K experts and needs `k_min` of them. Once every sample has that many, or can get no
more, pending experts get a little more time (`GatherTimeouts`) and are then dropped. Pure logic; experts are
numbers, and each is expected for some rows (samples) of the batch. The counts are NumPy arrays: a pass
updates them for each of hundreds of experts, and torch takes several times as long for a few rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from swarm.core.errors import UsageError

_Rows = npt.NDArray[np.int64]

_WAIT_S_MAX = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherTimeouts:
    """The time for which pending experts are awaited after all samples have enough answers."""

    after_k_min_s: float | None = None  # None: as long as the time until `k_min`, within bounds
    wait_s_min: float = 0.1

    def __post_init__(self) -> None:
        if self.after_k_min_s is not None and not self.after_k_min_s >= 0.0:
            raise UsageError(
                f"timeout_after_k_min_s is a number of seconds from 0 up, or None, not {self.after_k_min_s!r}"
            )
        if not self.wait_s_min >= 0.0:
            raise UsageError(f"gather timeouts need a wait_s_min of at least 0, not {self.wait_s_min!r}")

    def wait_s(self, elapsed_s: float) -> float:
        """Return the additional waiting time after `elapsed_s` of waiting."""
        if self.after_k_min_s is not None:
            return self.after_k_min_s
        return max(min(elapsed_s, _WAIT_S_MAX), self.wait_s_min)


class Gathering:
    """The answers of one pass, forward or backward. The pass is over at `deadline_s` in any case.

    Experts that are still pending when no answer has arrived for a while are suspected (`suspect_at_s`,
    `suspect`): replacements can be asked, and their own answers still count if they come.
    """

    def __init__(
        self, batch: int, k_min: int, timeouts: GatherTimeouts, begun_s: float, deadline_s: float
    ) -> None:
        self._k_min, self._timeouts = k_min, timeouts
        self._begun_s, self._until_s = begun_s, deadline_s
        self._answered_B = np.zeros(batch, np.int64)
        self._pending_B = np.zeros(batch, np.int64)
        self._suspected_B = np.zeros(batch, np.int64)
        self._rows: dict[int, _Rows] = {}  # rows of pending experts
        self._suspected: set[int] = set()
        self._expected_s: dict[int, float] = {}
        self._satisfied_s: float | None = None
        self._lacking_row = 0  # a row that waited for answers when the rows were looked at
        self._last_reply_s = begun_s
        self._has_reply = False  # some expert has answered or failed

    def expect(self, expert: int, rows: torch.Tensor, now_s: float, expected_s: float = 0.0) -> None:
        """Record that this expert was asked for these rows (distinct samples of the batch). Asking a
        replacement restarts the additional waiting time.

        `expected_s` is how long it may well take, judged by its recent answers.
        """
        self._rows[expert] = rows.numpy()
        self._expected_s[expert] = expected_s
        self._pending_B[self._rows[expert]] += 1
        self._satisfied_s, self._last_reply_s = None, now_s

    def answered(self, expert: int, now_s: float) -> None:
        """Record an expert's answer."""
        rows = self._remove(expert, now_s)
        if rows is not None:
            self._answered_B[rows] += 1
            self._check_satisfied(now_s)

    def failed(self, expert: int, now_s: float) -> None:
        """Record an expert's failure."""
        if self._remove(expert, now_s) is not None:
            self._check_satisfied(now_s)

    def suspect(self) -> list[int]:
        """Stop counting on pending experts. Return those that were counted on until now."""
        new = [expert for expert in self._rows if expert not in self._suspected]
        for expert in new:
            rows = self._rows[expert]
            self._pending_B[rows] -= 1
            self._suspected_B[rows] += 1
        self._suspected.update(new)
        return new

    @property
    def pending(self) -> list[int]:
        """Return the experts that have neither answered nor failed."""
        return list(self._rows)

    @property
    def unsatisfiable_rows(self) -> torch.Tensor:
        """Return the samples that cannot get `k_min` answers any more, even if every pending expert that is
        not suspected answers.
        """
        return torch.from_numpy(np.flatnonzero(self._answered_B + self._pending_B < self._k_min))

    @property
    def rows_below_k_min(self) -> torch.Tensor:
        """Return the samples that have fewer than `k_min` answers now."""
        return torch.from_numpy(np.flatnonzero(self._answered_B < self._k_min))

    def suspect_at_s(self) -> float | None:
        """Return the time at which pending experts become suspected if no answer arrives before; None when
        there are none, or all are suspected already.
        """
        counted_on = [expert for expert in self._rows if expert not in self._suspected]
        if not counted_on:
            return None
        expected_s = max(self._expected_s[expert] for expert in counted_on)
        return self._last_reply_s + max(self._timeouts.wait_s(self._last_reply_s - self._begun_s), expected_s)

    def deadline_s(self) -> float:
        """Return the time at which to check `over` again."""
        if self._satisfied_s is not None:
            return min(
                self._until_s, self._satisfied_s + self._timeouts.wait_s(self._satisfied_s - self._begun_s)
            )
        # no answer is required, so a pending expert may only double the time of the pass
        if not self._k_min and self._has_reply:
            suspect_at_s = self.suspect_at_s()
            return min(self._until_s, suspect_at_s if suspect_at_s is not None else self._last_reply_s)
        return self._until_s

    def over(self, now_s: float) -> bool:
        """Return whether waiting has ended: nothing is pending, or the deadline has passed."""
        return not self._rows or now_s >= self.deadline_s()

    def _remove(self, expert: int, now_s: float) -> _Rows | None:
        rows = self._rows.pop(expert, None)
        if rows is not None:
            (self._suspected_B if expert in self._suspected else self._pending_B)[rows] -= 1
            self._last_reply_s, self._has_reply = now_s, True
        return rows

    def _check_satisfied(self, now_s: float) -> None:
        if self._satisfied_s is None:
            # with a k_min of 0 a sample still waits for its first answer, unless none is pending
            needed, row = max(self._k_min, 1), self._lacking_row
            if self._answered_B[row] < needed and (self._pending_B[row] or self._suspected_B[row]):
                return  # most answers find one such row
            is_lacking_B = (self._answered_B < needed) & (self._pending_B + self._suspected_B > 0)
            self._lacking_row = int(is_lacking_B.argmax())
            if not is_lacking_B[self._lacking_row]:
                self._satisfied_s = now_s
