"""Rounds of several systems in turn, so that a slow period of the machine affects all of them alike."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.launch import LaunchFailed
from benchmarks.measured_systems import MeasuredSystem, Round
from benchmarks.results import Failures, Series

LAUNCHES_MAX = 3  # of one system in one pass: some launches of hivemind never complete a round
FAILED_ROUNDS_MAX = 3  # in one launch


@dataclass(slots=True)
class Tally(Failures):
    """The results of one system over all passes."""

    name: str
    rounds: list[Round] = field(default_factory=list)

    def series(self, quantity: str, of: Callable[[Round], float | None], *, unit: str = "s") -> Series:
        samples = (value for value in map(of, self.rounds) if value is not None)
        return self.series_of(f"{self.name}: {quantity}" if quantity else self.name, samples, unit)

    def spending(self) -> str:
        """Return in words where its rounds spend their time: medians of processor seconds and of the reported
        phases.
        """
        if not self.rounds:
            return f"{self.name}: no round"
        processor_s = statistics.median(outcome.processor_s for outcome in self.rounds)
        phases = {
            name: statistics.median(outcome.phases.get(name, 0.0) for outcome in self.rounds)
            for name in self.rounds[0].phases
        }
        phases_text = "".join(f", {name} {seconds * 1e3:.0f} ms" for name, seconds in phases.items())
        return f"{self.name}: {processor_s:.2f} processor seconds a round{phases_text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    passes: int  # each with new processes
    rounds: int  # measured, per system and pass
    warm_up: int = 1  # rounds dropped after each launch


class _SystemRun:
    """One system in one pass: launched when first needed, and again after a failure."""

    def __init__(
        self,
        make: Callable[[], MeasuredSystem],
        tally: Tally,
        plan: Plan,
        open_systems: contextlib.ExitStack,
    ) -> None:
        self._make, self._tally, self._plan, self._stack = make, tally, plan, open_systems
        self._system: MeasuredSystem | None = None
        self._own: contextlib.ExitStack | None = None
        self._launches, self._failed, self._left = 0, 0, plan.rounds

    @property
    def unfinished(self) -> bool:
        return self._left > 0

    def advance(self) -> None:
        """Run one measured round, or the launch and warm-up that come before it."""
        try:
            if self._system is None:
                self._launch()
            else:
                self._measure(self._system)
        except LaunchFailed as failure:
            self._tally.launches_failed += 1
            self._tally.fail(str(failure))
            self._close()
            if self._launches >= LAUNCHES_MAX:
                self._left = 0

    def _launch(self) -> None:
        self._launches += 1
        self._own = self._stack.enter_context(contextlib.ExitStack())
        system = self._own.enter_context(self._make())
        for _ in range(self._plan.warm_up):
            system.round()
        self._system = system

    def _measure(self, system: MeasuredSystem) -> None:
        outcome = system.round()
        if outcome.ok:
            self._tally.rounds.append(outcome)
            self._left -= 1
            return
        self._tally.failed += 1
        self._tally.wrong += outcome.wrong
        self._tally.fail(outcome.reason)
        self._failed += 1
        if self._failed >= FAILED_ROUNDS_MAX:
            self._left = 0

    def _close(self) -> None:
        if self._own is not None:
            self._own.close()
        self._system = self._own = None


def interleave(
    makers: Sequence[Callable[[], MeasuredSystem]],
    names: Sequence[str],
    plan: Plan,
    say: Callable[[str], None],
) -> list[Tally]:
    """Run rounds of all systems in turn and return a tally for each.

    All systems are open at once and idle while another has its round. Every pass starts new processes, in the
    opposite order of the last one.
    """
    tallies = [Tally(name) for name in names]
    for number in range(plan.passes):
        order = list(zip(makers, tallies, strict=True))
        if number % 2:
            order.reverse()
        with contextlib.ExitStack() as stack:
            runs = [_SystemRun(make, tally, plan, stack) for make, tally in order]
            while any(run.unfinished for run in runs):
                for run in runs:
                    if run.unfinished:
                        run.advance()
        say(f"  pass {number + 1} of {plan.passes}: " + ", ".join(_progress(tally) for tally in tallies))
    return tallies


def _progress(tally: Tally) -> str:
    last = f"{tally.rounds[-1].whole_s:.3g} s" if tally.rounds else "nothing yet"
    return f"{tally.name} {last}" + (
        f" ({tally.failed + tally.launches_failed} failed)" if tally.failed or tally.launches_failed else ""
    )
