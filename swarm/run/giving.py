"""Count the contributions of one volunteer to its run, and add them to this user's log while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date, datetime
from typing import TYPE_CHECKING

from swarm.run.contributions import ContributionLog, Given
from swarm.run.events import ContributionSums, Emit, Notice

if TYPE_CHECKING:
    from swarm.run.stats import TrainingStats

RECORD_S = 10.0  # interval of writing to the log


def local_now() -> tuple[date, float]:
    """Return the local date and the seconds of a monotonic clock."""
    return datetime.now().astimezone().date(), time.monotonic()


class Giving:
    """The contribution of one process. For the trainer's thread."""

    def __init__(
        self,
        log: ContributionLog | None,
        run: str,
        *,
        traffic: Callable[[], tuple[int, int]],
        joules: Callable[[], float | None],
        emit: Emit,
        now: Callable[[], tuple[date, float]] = local_now,
    ) -> None:
        """`run`: as `name@id`. `log`: None to record nothing. `traffic` returns the bytes that this process
        has sent and received so far. `joules` returns the energy that the device has used since a fixed
        moment, or None if it cannot be read. `now` returns the local date and the seconds of a monotonic
        clock.
        """
        self._log, self._run, self._traffic, self._joules, self._emit = log, run, traffic, joules, emit
        self._now = now
        self._stats: TrainingStats | None = None
        self._trained_s = self._spent_j = 0.0
        self._began: tuple[float, float | None] | None = None  # time and energy, while it trains
        self._recorded = Given()
        self._due_s = now()[1] + RECORD_S
        self._day = self._month = Given()
        self._sum_up()

    def start(self, stats: TrainingStats) -> None:
        """Count time, energy and the contributions in `stats` from now on."""
        self._stats = stats
        self._began = (self._now()[1], self._joules())

    def stop(self) -> None:
        """Record the contributions so far, and count no time and energy until `start`."""
        self._count()
        self._began = None
        self.record(at_once=True)

    def bytes_spent(self) -> tuple[int, int]:
        """Return the bytes sent and received by all of this user's volunteers today and this month; those of
        other processes are as of their last record.
        """
        since = self._given().bytes - self._recorded.bytes
        return self._day.bytes + since, self._month.bytes + since

    def record(self, *, at_once: bool = False) -> None:
        """Add the contributions since the last record to the log, if a record is due or `at_once`, and emit
        the sums.
        """
        if self._log is None or (self._now()[1] < self._due_s and not at_once):
            return
        self._due_s = self._now()[1] + RECORD_S
        self._count()
        given = self._given()
        try:
            self._log.add(self._now()[0], self._run, given - self._recorded)
        except OSError as error:
            self._give_up(error)
            return
        self._recorded = given
        self._sum_up()
        if self._log is not None:
            self._emit(ContributionSums(today=self._day, altogether=self._of_run))

    def _count(self) -> None:
        if self._began is None:
            return
        now, (began_s, before_j) = (self._now()[1], self._joules()), self._began
        self._trained_s += now[0] - began_s
        if now[1] is not None and before_j is not None:
            self._spent_j += max(now[1] - before_j, 0.0)  # a counter that was reset adds nothing
        self._began = now

    def _given(self) -> Given:
        sent_bytes, received_bytes = self._traffic()
        return Given(
            samples=self._stats.samples if self._stats is not None else 0,
            rounds=self._stats.rounds if self._stats is not None else 0,
            seconds=self._trained_s,
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
            joules=self._spent_j,
        )

    def _sum_up(self) -> None:
        if self._log is None:
            return
        today = self._now()[0]
        try:
            self._day = self._log.total(since=today)
            self._month = self._log.total(since=today.replace(day=1))
            self._of_run = self._log.total(run=self._run)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Continue without the log. Budgets then count what this process sends and receives."""
        self._emit(Notice(text=f"contributions are not recorded any more: {error}"))
        self._log, self._recorded = None, Given()
